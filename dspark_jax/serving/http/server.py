"""The server's life: the address, the models, the warm-up, serving, and a graceful end."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from pathlib import Path
from types import FrameType

import uvicorn

from dspark_jax.checkpoints.load import EMBEDDED_HUB_ID
from dspark_jax.config import log_to_stderr, write_json
from dspark_jax.decoding.engine import Engine
from dspark_jax.decoding.generate import Generator
from dspark_jax.serving.http.app import create_app
from dspark_jax.serving.http.service import Service, Serving
from dspark_jax.serving.http.settings import parse_address
from dspark_jax.serving.offline import Models, load_models, make_serving_generator
from dspark_jax.serving.settings import ServeSettings

logger = logging.getLogger(__name__)
_KEEP_ALIVE = 30  # seconds that an idle connection stays open
_LAST_WRITES = 5  # seconds that slow readers get when the server ends
_ENGINE_SECONDS = 60  # that the engine gets to end its last rounds
_OWN_ADDRESSES = ("127.0.0.1", "::1")


def bind(host: str, port: int) -> socket.socket:
    """A socket at the address, before minutes are spent on loading and compiling.

    Raises:
        OSError: the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise OSError(f"http {host}:{port}: the address cannot be had ({error.strerror or error})") from error
    return bound


def model_name(settings: ServeSettings) -> str:
    """The served model's name: as given, or of the target's file or folder."""
    if settings.server.model_name is not None:
        return settings.server.model_name
    if settings.target is None:
        return EMBEDDED_HUB_ID
    path = Path(settings.target)
    return path.resolve().name.removesuffix(".gguf") if path.exists() else settings.target


def make_service(settings: ServeSettings, models: Models, generator: Generator) -> Service:
    """The engine, warmed up and started, and what the routes share."""
    options = settings.server
    engine = Engine(generator, options.rounds)
    if options.warm_up:
        longest = min(options.warm_up_tokens or engine.generator.context, engine.generator.context)
        logger.info("compiling for texts of up to %d tokens ...", longest)
        engine.warm_up(longest, longest - 1)
    drafter = None if models.drafter is None else models.drafter.path.name
    serving = Serving(
        model_name(settings),
        drafter,
        options.keys(),
        options.max_logprobs,
        options.max_waiting,
        options.max_body,
    )
    return Service(engine.start(), models.target.tokenizer, serving)


class Server(uvicorn.Server):
    """A server that ends gracefully: at a signal it refuses new requests and lets those that run end."""

    def __init__(self, service: Service, drain_seconds: float) -> None:
        config = uvicorn.Config(
            create_app(service),
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            ws="none",
            lifespan="off",
            timeout_keep_alive=_KEEP_ALIVE,
            timeout_graceful_shutdown=_LAST_WRITES,
        )
        super().__init__(config)
        self._service, self._drain_seconds = service, drain_seconds
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Opens the address and says so."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        for bound in sockets or ():
            host, port = bound.getsockname()[:2]
            where = f"[{host}]" if ":" in host else host
            print(f"ready: http://{where}:{port} serves {self._service.serving.model}", flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal begins the end; a second one ends at once.

        It may come while a line of the log is written, when another line would raise: the loop writes it.
        """
        if self._loop is None or self._ending is not None:
            self.should_exit = self.force_exit = True
            return
        self._loop.call_soon_threadsafe(self._begin_end, signal.Signals(sig).name)

    def _begin_end(self, name: str) -> None:
        if self._ending is None:
            logger.info("%s: running requests have %g s to end", name, self._drain_seconds)
            self._ending = asyncio.ensure_future(self._end())

    async def _end(self) -> None:
        if not await self._service.drain(self._drain_seconds):
            logger.warning("requests were cut off after %g s", self._drain_seconds)
        self.should_exit = True


def serve(settings: ServeSettings) -> int:
    """Serves until a signal; returns the exit code.

    Raises:
        ValueError, OSError: models that cannot be served, or an address that cannot be had.
    """
    options = settings.server
    assert options.http is not None  # checked by ServeSettings
    host, port = parse_address(options.http)
    with bind(host, port) as bound:
        models = load_models(settings)
        generator = make_serving_generator(models, settings)
        with log_to_stderr("%(asctime)s %(message)s"):
            service = _run(settings, models, generator, bound)
    if settings.json is not None:
        statistics = service.engine.batch.statistics.as_json()
        write_json(settings.json, {"settings": settings.as_json(), "statistics": statistics})
    return 0


def _run(settings: ServeSettings, models: Models, generator: Generator, bound: socket.socket) -> Service:
    """Serves at the address of `bound` until a signal."""
    options = settings.server
    if not options.keys() and bound.getsockname()[0] not in _OWN_ADDRESSES:
        logger.warning("no API key: everybody who can reach %s may ask", options.http)
    service = make_service(settings, models, generator)
    try:
        Server(service, options.drain_seconds).run(sockets=[bound])
    finally:
        service.close()
        try:
            service.engine.close(drain=False, timeout=_ENGINE_SECONDS)
        except TimeoutError as error:
            logger.warning("%s", error)
    return service
