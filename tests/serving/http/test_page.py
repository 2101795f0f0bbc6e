"""The page in a real browser, against scripted answers or, with DSPARK_PAGE_URL=http://host:port/, a running server."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

pytest.importorskip("selenium", reason="the page's tests drive Chromium with selenium: pip install selenium")
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from tests.serving.http import fake_server
from tests.serving.http.fake_server import Fake, Round

URL = os.environ.get("DSPARK_PAGE_URL")
CHROMIUM, CHROMEDRIVER = (shutil.which(name) for name in ("chromium", "chromedriver"))
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and CHROMEDRIVER), reason="needs chromium and chromedriver: apt-get install chromium chromium-driver"
)

WIDE, PHONE = (1280, 800), (360, 740)
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage"
)
ORIGINS = ("draft", "corrected", "bonus", "plain")
# What the page asks of the server, and what its live region gives to a screen reader.
SPY = """
window.asked = []; window.said = [];
const fetched = window.fetch;
window.fetch = (url, options) => {
  if (options?.body) window.asked.push({...JSON.parse(options.body), headers: options.headers});
  return fetched(url, options);
};
addEventListener("DOMContentLoaded", () => new MutationObserver((changes) => {
  for (const change of changes) for (const node of change.addedNodes) window.said.push(node.textContent);
}).observe(document.getElementById("live"), {childList: true}));
"""
FOCUS_SEEN = """
const node = document.activeElement;
const style = getComputedStyle(node.id === "prompt" ? node.closest(".box") : node);
return style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0 || style.boxShadow !== "none";
"""
# The least contrast of any visible text with what is painted behind it.
CONTRAST = """
const parse = (text) => {
  const numbers = text.match(/[\\d.]+/g).map(Number);
  return [...numbers.slice(0, 3), numbers[3] ?? 1];
};
const over = (top, under) => [0, 1, 2].map((i) => top[i] * top[3] + under[i] * (1 - top[3])).concat(1);
const behind = (node) => {
  if (!node) return [255, 255, 255, 1];
  const colour = parse(getComputedStyle(node).backgroundColor);
  return colour[3] === 1 ? colour : over(colour, behind(node.parentElement));
};
const luminance = (colour) => colour.slice(0, 3).map((x) => x / 255)
  .map((x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4))
  .reduce((sum, x, i) => sum + x * [0.2126, 0.7152, 0.0722][i], 0);
const found = [];
for (const node of document.querySelectorAll("body *")) {
  const texts = [...node.childNodes].filter((child) => child.nodeType === 3 && child.data.trim());
  if (!texts.length || !node.checkVisibility({visibilityProperty: true}) || node.closest(":disabled")) continue;
  const under = behind(node);
  const [a, b] = [luminance(over(parse(getComputedStyle(node).color), under)), luminance(under)];
  found.push([(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), node.className + ": " + texts[0].data.trim()]);
}
return found.sort((x, y) => x[0] - y[0])[0];
"""


class Page:
    """The page in a browser: what a reader does and sees."""

    def __init__(self, driver: webdriver.Chrome, url: str) -> None:
        self.driver = driver
        self.url = url
        self.failing = False  # a test expects answers that the browser logs as failed

    def open(self, size: tuple[int, int] = WIDE, scheme: str = "light", touch: bool = False) -> None:
        """Loads the page anew and waits until it has found the server."""
        cdp = self.driver.execute_cdp_cmd
        metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": touch}
        cdp("Emulation.setDeviceMetricsOverride", metrics)
        cdp("Emulation.setTouchEmulationEnabled", {"enabled": touch})
        cdp("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
        self.driver.get(self.url)
        if self.js("const kept = sessionStorage.length; sessionStorage.clear(); return kept"):
            self.driver.get(self.url)
        self.until(lambda: self.get("health").text in ("Ready", "Not ready"))

    def get(self, name: str) -> WebElement:
        return self.driver.find_element(By.ID, name)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def js(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def until(self, condition: Callable[[], Any], seconds: float = 30) -> None:
        """Waits until a condition holds; raises AssertionError if it does not within the time."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"not within {seconds} s; the page says: {self.get('turns').text[-500:]}"
            time.sleep(0.02)

    def keys(self, *keys: str, shift: bool = False) -> None:
        """Types into whatever has the focus."""
        chain = ActionChains(self.driver)
        (chain.key_down(Keys.SHIFT) if shift else chain).send_keys(*keys).key_up(Keys.SHIFT).perform()

    def ask(self, text: str, wait: bool = True) -> None:
        self.get("prompt").send_keys(text, Keys.ENTER)
        if wait:
            self.until(self.idle)

    def idle(self) -> bool:
        """The last answer is whole and drawn."""
        return bool(self.js("return running === null && !framed && !(shown?.pending.length)"))

    def answer(self) -> str:
        """The last answer as it stands on the page."""
        return str(self.js("return shown.body.textContent"))

    def tokens(self) -> list[tuple[str, str]]:
        """Text and origin of each token of the last answer."""
        script = "return [...shown.body.querySelectorAll('.t')].map((t) => [t.textContent, t.className.split(' ')[1]])"
        return [(text, origin) for text, origin in self.js(script)]

    def figures(self) -> dict[str, str]:
        ids = ("speed", "first", "acceptance", "length", "budget", "rounds", "totals")
        return {name: self.get(name).text for name in ids}

    def asked(self) -> list[dict[str, Any]]:
        """Bodies of the page's completion requests, with the headers under "headers"."""
        return list(self.js("return window.asked"))

    def set(self, **fields: str) -> None:
        """Fills settings in the drawer."""
        self.get("open-settings").click()
        for name, value in fields.items():
            self.get(name).clear()
            self.get(name).send_keys(value)
        self.get("close-settings").click()

    def overflow(self) -> int:
        """Pixels by which the page, its conversation or its panel is wider than it may be."""
        widths = self.js(
            "return [document.documentElement, log, panel, sections].map((n) => n.scrollWidth - n.clientWidth)"
            ".concat([...document.querySelectorAll('body *')]"
            ".filter((n) => !n.closest('.sr, svg') && n.checkVisibility())"
            ".map((n) => Math.floor(n.getBoundingClientRect().right) - innerWidth))"
        )
        return int(max(widths))

    def problems(self) -> list[str]:
        """Errors in the browser's log, less refused requests where a test expects them."""
        entries = self.driver.get_log("browser")  # type: ignore[no-untyped-call]
        wrong = [entry for entry in entries if entry["level"] == "SEVERE"]
        return [entry["message"] for entry in wrong if not (self.failing and entry["source"] == "network")]


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, Fake | None]]:
    """The address of the page, and the scripted server behind it where it is that one."""
    if URL:
        yield URL, None
        return
    fake = Fake()
    with fake_server.serving(fake_server.application(fake)) as url:
        yield url, fake


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in (*FLAGS.split(), f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(str(CHROMEDRIVER)))
    driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": SPY})
    yield driver
    driver.quit()


@pytest.fixture
def page(driver: webdriver.Chrome, server: tuple[str, Fake | None]) -> Iterator[Page]:
    """The page, freshly loaded; a test fails if the browser logged an error."""
    page = Page(driver, server[0])
    page.open()
    yield page
    if not page.idle():
        page.get("stop").click()
        page.until(page.idle)
    assert page.problems() == []


@pytest.fixture
def fake(server: tuple[str, Fake | None]) -> Iterator[Fake]:
    """The scripted server, as new."""
    if server[1] is None:
        pytest.skip("needs the scripted server: run without DSPARK_PAGE_URL")
    server[1].reset()
    yield server[1]
    server[1].reset()


def flat(rounds: Sequence[Round]) -> list[tuple[str, str]]:
    """Text and origin of each token."""
    return [token for made in rounds for token in made.tokens]


def test_an_answer_arrives_whole(page, fake):
    """Bytes are cut inside characters and line ends, and a token may be a part of a character."""
    page.ask("hello")
    assert page.answer() == fake_server.HELLO
    assert page.tokens() == flat(fake_server.drafted(fake_server.HELLO))
    assert {origin for _, origin in page.tokens()} == set(ORIGINS) and ("", "draft") in page.tokens()


def test_any_answer_is_traced(page):
    page.ask("Hello, who are you?")
    tokens = page.tokens()
    assert tokens and "".join(text for text, _ in tokens) == page.answer() == page.js("return shown.text")
    assert {origin for _, origin in tokens} <= set(ORIGINS)
    assert page.figures()["speed"] != "–" and page.figures()["first"] != "–"


def test_streams_are_read_wherever_they_are_cut(page):
    """Every cut into two pieces, for each kind of line end."""
    lines = [": note", "data: ä🙂", "", "event: x", "data:one", "data: two", "", "data: last"]
    script = """
      const [text, done] = arguments;
      const bytes = new TextEncoder().encode(text);
      (async () => {
        const seen = new Set();
        for (let at = 0; at <= bytes.length; at++) {
          const start = (stream) => {
            for (const piece of [bytes.slice(0, at), bytes.slice(at)]) stream.enqueue(piece);
            stream.close();
          };
          const events = [];
          await readEvents(new ReadableStream({start}), (data) => events.push(data));
          seen.add(JSON.stringify(events));
        }
        done([...seen]);
      })();"""
    for end in ("\n", "\r\n", "\r"):
        seen = page.driver.execute_async_script(script, end.join(lines))
        assert [json.loads(text) for text in seen] == [["ä🙂", "one\ntwo", "last"]], repr(end)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_and_lines(page, fake, scheme):
    """Origins differ in both, and all text has the contrast 4.5 of WCAG's AA: introduction, error, round, settings."""
    page.failing = True
    page.open(scheme=scheme)
    worst = [page.js(CONTRAST)]
    page.ask("hello")
    page.ask("refused")
    styles = page.js(
        "return arguments[0].map((o) => getComputedStyle(document.querySelector('.tokens .' + o)))"
        ".map((s) => [s.color, s.textDecorationLine + ' ' + s.textDecorationStyle])",
        list(ORIGINS),
    )
    assert len({colour for colour, _ in styles}) == 4 and len({line for _, line in styles}) == 4
    ActionChains(page.driver).move_to_element(page.all(".tokens .corrected")[0]).perform()
    assert page.get("tip").is_displayed()
    worst.append(page.js(CONTRAST))
    page.get("open-settings").click()
    worst.append(page.js(CONTRAST))
    assert min(ratio for ratio, _ in worst) >= 4.5, worst


def test_the_panel_shows_the_servers_figures(page, fake):
    page.ask("hello")
    rounds = fake_server.drafted(fake_server.HELLO)
    said = fake_server.summary(rounds)
    assert page.figures() == {
        "speed": "123",
        "first": "87 ms",
        "acceptance": f"{round(100 * said['accepted'] / said['verified'])} %",
        "length": f"{said['accepted_length']:.2f}",
        "budget": f"{said['verify_budget']:.2f}",
        "rounds": str(said["rounds"]),
        "totals": f"{said['drafted']} drafted, {said['verified']} verified, {said['accepted']} accepted",
    }
    last = rounds[-1]
    assert page.get("block-text").text == (
        f"Round {said['rounds']}: {len(last.drafts)} proposed, {last.verified} verified, {last.accepted} accepted"
    )
    assert page.get("history-text").text == f"Last {said['rounds']} rounds: 0 to 5 drafts accepted"
    own = page.js("shown.summary = null; return shown.figures()")  # what it counts itself until the summary comes
    counted = ("rounds", "accepted_length", "verify_budget", "drafted", "verified", "accepted")
    assert {name: own[name] for name in counted} == pytest.approx({name: said[name] for name in counted})


def test_bars_show_confidence_and_fate(page, fake):
    """The second block: two of four verified drafts accepted, and one that was not verified."""
    made = fake_server.drafted(fake_server.HELLO)[2]
    page.js("const a = new Answer('speculative'); a.count(arguments[0]); drawPanel(a)", made.as_json())
    bars = page.js(
        "return [...slots.querySelectorAll('rect')].map((r) => [r.className.baseVal, +r.getAttribute('height')])"
    )
    kinds = [kind.removeprefix("slot ") for kind, _ in bars]
    assert kinds == ["accepted", "accepted", "rejected", "rejected", "unseen"]
    assert [height / 67 for _, height in bars] == pytest.approx(made.confidence, abs=0.01)


def test_a_token_shows_its_round(page, fake):
    page.ask("hello")
    token = page.all(".tokens .corrected")[0]
    ActionChains(page.driver).move_to_element(token).perform()
    tip = page.get("tip")
    assert tip.is_displayed() and token.get_attribute("aria-describedby")
    made = fake_server.drafted(fake_server.HELLO)[2]
    assert made.tokens[-1][1] == "corrected"
    text = tip.text
    assert "Round 2: corrected" in text and "Proposed 5, verified 4, accepted 2." in text
    rows = [[cell.text for cell in row.find_elements(By.TAG_NAME, "td")] for row in page.all("#tip tbody tr")]
    assert [row[0] for row in rows] == ["1", "2", "3", "4", "5"]
    assert [row[1] for row in rows] == [draft.replace(" ", "␣") for draft in made.drafts]
    assert [row[2] for row in rows] == [f"{value:.2f}" for value in made.confidence]
    assert [row[3] for row in rows] == ["accepted", "accepted", "rejected", "after it", "not verified"]
    assert "Corrected to " + made.tokens[-1][0].replace(" ", "␣") in text
    ActionChains(page.driver).move_to_element(page.get("health")).perform()
    page.until(lambda: not tip.is_displayed(), 3)
    page.all(".tokens .plain")[0].click()
    assert "Prefill: plain" in tip.text


def test_the_switch_asks_for_plain_decoding(page):
    page.ask("Hello there")
    switch = page.get("speculative")
    assert switch.get_attribute("role") == "switch" and switch.get_attribute("aria-checked") == "true"
    switch.click()
    assert switch.get_attribute("aria-checked") == "false"
    page.ask("Hello again")
    first, second = page.asked()
    assert first.get("speculative", True) is True and second["speculative"] is False
    assert first["trace"] is True and first["stream"] is True and "max_tokens" not in first
    assert {origin for _, origin in page.tokens()} == {"plain"}
    runs = [row.text.split()[0] for row in page.all("#runs .run")]
    assert runs == ["Speculative", "Plain"] and "times as fast as plain" in page.get("runs").text


def test_two_runs_are_compared(page, fake):
    page.ask("hello")
    page.get("speculative").click()
    page.ask("hello")
    text = page.get("runs").text
    assert "123 tok/s" in text and "45.6 tok/s" in text
    assert "Speculative is 2.71 times as fast as plain" in text
    assert page.get("acceptance").text == "–" and page.get("length").text == "1.00"


def test_settings_reach_the_server(page):
    page.set(system="Be brief.", temperature="0.5", max_tokens="17", seed="3", key="secret")
    page.ask("Hi")
    (asked,) = page.asked()
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    expected = {"messages": messages, "temperature": 0.5, "max_tokens": 17, "seed": 3}
    assert {name: asked[name] for name in expected} == expected
    assert asked["headers"]["Authorization"] == "Bearer secret"
    assert page.js("return sessionStorage.getItem('dspark.key')") == "secret"
    assert page.js("return Object.keys(localStorage).length") == 0
    page.set(temperature="7")  # is shown to be wrong, and not sent
    page.ask("Hi", wait=False)
    assert page.get("settings").is_displayed() and len(page.asked()) == 1
    assert page.js("return document.activeElement.id") == "temperature"


def test_a_chat_of_several_turns(page, fake):
    page.failing = True
    for text in ("hello one", "refused", "hello two"):
        page.ask(text)
    roles = [(m["role"], m["content"]) for m in page.asked()[-1]["messages"]]
    assert roles == [("user", "hello one"), ("assistant", fake_server.HELLO), ("user", "hello two")]
    page.get("clear").click()
    assert page.get("turns").text == "" and page.get("intro").is_displayed() and page.get("speed").text == "–"
    page.ask("hello three")
    assert len(page.asked()[-1]["messages"]) == 1


def test_stop_reaches_the_server(page, fake):
    """The button, and Escape while the next message is written; what came stays in the talk."""
    page.ask("slow", wait=False)
    page.until(lambda: len(page.tokens()) > 10)
    assert not page.get("send").is_enabled()
    page.get("stop").click()
    page.until(lambda: fake.disconnects == 1 and fake.active == 0, 5)
    page.until(page.idle)
    text = page.answer()
    assert fake_server.LONG.startswith(text) and "stopped by you" in page.all(".foot")[-1].text
    assert page.js("return document.activeElement.id") == "prompt"
    assert page.get("send").is_enabled() and not page.get("stop").is_displayed()
    page.ask("hello")
    assert page.asked()[-1]["messages"][1] == {"role": "assistant", "content": text}
    page.ask("slow", wait=False)
    page.until(lambda: len(page.tokens()) > 3)
    page.keys("more", Keys.ENTER, Keys.ESCAPE)
    page.until(lambda: page.idle() and fake.disconnects == 2, 5)
    assert page.get("prompt").get_attribute("value") == "more" and len(page.asked()) == 3


def test_errors_are_readable(page, fake):
    page.failing = True
    cases = {
        "refused": "max_tokens is 9, must be below 5",
        "busy": "The queue is full. Try again in 3 s.",
        "failed": "Internal Server Error",
        "broken": "The engine failed: out of memory",
        "closed": "The connection was closed before the answer was complete.",
    }
    for name, message in cases.items():
        page.ask(name)
        box = page.all(".error")[-1]
        assert message in box.text and box.get_attribute("role") == "alert"
    assert fake_server.HELLO.startswith(page.answer()) and page.answer()
    (retry,) = page.all(".retry")
    retry.click()
    page.until(lambda: len(page.asked()) == len(cases) + 1 and page.idle())
    assert len(page.all(".answer")) == len(cases)


def test_a_key_is_asked_for(page, fake):
    page.failing = True
    fake.key = "right"
    page.ask("hello")
    assert "The API key is missing or wrong." in page.all(".error")[0].text
    page.all(".error .btn")[0].click()
    assert page.js("return document.activeElement.id") == "key"
    page.keys("right", Keys.ENTER)
    page.all(".retry")[0].click()
    page.until(lambda: page.idle() and page.answer() == fake_server.HELLO)


def test_health_is_shown_and_comes_back(page, fake):
    page.failing = True
    assert page.get("model").text == "tiny-target, drafted by tiny-drafter"
    fake.healthy = False
    page.js("watchHealth()")
    page.until(lambda: page.get("health").text == "Not ready", 5)
    page.driver.set_network_conditions(offline=True, latency=0, throughput=1)
    page.js("watchHealth()")
    page.until(lambda: page.get("health").text == "No connection", 5)
    page.ask("hello")
    assert "cannot be reached" in page.all(".error")[0].text
    fake.healthy = True
    page.driver.delete_network_conditions()
    page.until(lambda: page.get("health").text == "Ready", 10)


def test_html_is_shown_as_text(page, fake):
    title = page.driver.title
    page.ask("html <i>mine</i>")
    assert page.answer() == fake_server.HTML and page.driver.title == title
    assert page.all("#turns b, #turns i, #turns img, #turns script") == []
    assert page.all(".you p")[0].text == "html <i>mine</i>"


def test_keys_alone_are_enough(page):
    """From loading the page to reading a token's round, the switch, the settings and back."""
    assert page.js("return document.activeElement.id") == "prompt"
    page.keys("Hello")
    page.keys(Keys.ENTER, shift=True)
    assert page.asked() == []
    page.keys("you", Keys.ENTER)
    page.until(page.idle)
    assert page.asked()[0]["messages"][-1]["content"] == "Hello\nyou"
    for _ in range(20):  # back to the answer's tokens, each stop with a visible focus
        page.keys(Keys.TAB, shift=True)
        assert page.js(FOCUS_SEEN) is True
        if page.js("return document.activeElement.className") == "tokens":
            break
    page.keys(Keys.ARROW_RIGHT)
    assert page.get("tip").is_displayed() and page.get("tip").text.startswith("Prefill")
    page.keys(Keys.ARROW_DOWN)
    assert page.get("tip").text.startswith("Round 1")
    page.keys(Keys.END)
    assert page.js("return document.activeElement === [...document.querySelectorAll('.tokens .t')].at(-1)")
    page.keys(Keys.ESCAPE)
    assert not page.get("tip").is_displayed()
    page.until(lambda: page.keys(Keys.TAB) or page.js("return document.activeElement.id") == "speculative")
    page.keys(Keys.SPACE)
    assert page.get("speculative").get_attribute("aria-checked") == "false"
    page.until(lambda: page.keys(Keys.TAB) or page.js("return document.activeElement.id") == "open-settings")
    page.keys(Keys.ENTER)
    assert page.get("settings").is_displayed()
    page.keys(Keys.ESCAPE)
    assert not page.get("settings").is_displayed()
    assert page.js("return document.activeElement.id") == "open-settings"


def test_answers_are_read_out_once(page, fake):
    page.ask("hello")
    said = page.js("return window.said")
    assert len(said) < 10 and [re.sub(r"\s", "", "".join(said))] == [re.sub(r"\s", "", fake_server.HELLO)]
    assert page.all("[aria-live] .t, [role=log]") == []


def test_every_control_has_a_name(page):
    page.get("open-settings").click()
    unnamed = page.js(
        "return [...document.querySelectorAll('button, input, textarea, [role], svg[role]')].filter((n) =>"
        " !(n.ariaLabel || n.textContent.trim() || n.labels?.length || n.hidden)).map((n) => n.outerHTML)"
    )
    assert unnamed == []


def test_the_answer_is_copied(page, fake):
    page.ask("hello")
    grant = {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"], "origin": page.url.rstrip("/")}
    page.driver.execute_cdp_cmd("Browser.grantPermissions", grant)
    page.all(".copy")[0].click()
    page.until(lambda: page.all(".copy")[0].text == "Copied", 5)
    assert page.driver.execute_async_script("navigator.clipboard.readText().then(arguments[0])") == fake_server.HELLO


@pytest.mark.parametrize("size", [PHONE, (320, 568), (768, 1024), WIDE])
def test_nothing_is_wider_than_the_window(page, size):
    page.open(size)
    assert page.overflow() <= 0
    page.ask("Hello " + "long" * 60)
    if page.get("toggle").is_displayed():
        page.get("toggle").click()
        assert page.get("speed").is_displayed()
    page.js("setBusy(true)")  # the button Stop needs room
    assert page.overflow() <= 0
    page.js("setBusy(false)")
    page.get("open-settings").click()
    assert page.overflow() <= 0


def test_a_phone_can_tap_everything(page, fake):
    page.open(PHONE, touch=True)
    small = (
        "return [...document.querySelectorAll('button, input, textarea')].filter((n) => n.checkVisibility())"
        ".map((n) => [n.getBoundingClientRect(), n.id || n.textContent])"
        ".filter(([r]) => r.width < 44 || r.height < 44).map(([, name]) => name)"
    )
    assert page.js(small) == []
    page.ask("hello")
    page.get("toggle").click()
    assert page.js(small) == []
    page.get("toggle").click()
    token = page.all(".tokens .bonus")[-1].rect
    point = {"x": token["x"] + token["width"] / 2, "y": token["y"] + token["height"] / 2}
    page.driver.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": "touchStart", "touchPoints": [point]})
    page.driver.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    page.until(lambda: page.get("tip").is_displayed(), 3)
    tip = page.get("tip").rect
    assert 0 <= tip["x"] <= PHONE[0] - tip["width"] and 0 <= tip["y"] <= PHONE[1] - tip["height"]
    assert page.overflow() <= 0
    page.get("open-settings").click()
    assert page.js(small) == []


def test_scrolling_follows_only_a_reader_at_the_end(page, fake):
    away = "return Math.round(log.scrollHeight - log.scrollTop - log.clientHeight)"
    page.ask("long")
    assert page.js(away) <= 1
    page.ask("slow", wait=False)
    page.until(lambda: len(page.tokens()) > 20)
    assert page.js(away) <= 1
    page.js("log.scrollTop = 300")
    count = len(page.tokens())
    page.until(lambda: len(page.tokens()) > count + 20)
    assert page.js("return log.scrollTop") == 300 and page.get("jump").is_displayed()
    page.get("jump").click()
    page.until(lambda: len(page.tokens()) > count + 60)
    assert page.js(away) <= 1 and not page.get("jump").is_displayed()
    assert page.js("return document.documentElement.scrollHeight - innerHeight") <= 0


def test_thousands_of_tokens(page, fake):
    """Whole, in blocks that keep layout cheap, and with the server's limit told."""
    page.set(max_tokens="5000")
    page.ask("long")
    tokens = page.tokens()
    expected = flat(fake_server.drafted(fake_server.LONG))[: len(tokens)]
    assert len(tokens) > 4990 and tokens == expected
    assert "stopped at the limit of 5000 tokens" in page.all(".foot")[0].text
    lengths = page.js("return [...document.querySelectorAll('.lines')].map((n) => n.textContent.length)")
    assert max(lengths) < 1000
