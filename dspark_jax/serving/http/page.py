"""The page at `/`: one file, which may run its own script and style, and nothing else."""

from __future__ import annotations

import base64
import hashlib
from html.parser import HTMLParser
from pathlib import Path

PAGE = Path(__file__).with_name("page.html")


class _Inline(HTMLParser):
    """Collects the text of inline <script> and <style> elements."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=False)
        self.texts: dict[str, list[str]] = {"script": [], "style": []}
        self._open = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """An element opens."""
        if tag in self.texts and not any(name == "src" for name, _ in attrs):
            self._open = tag
            self.texts[tag].append("")

    def handle_data(self, data: str) -> None:
        """Text inside it."""
        if self._open:
            self.texts[self._open][-1] += data

    def handle_endtag(self, tag: str) -> None:
        """It closes."""
        if tag == self._open:
            self._open = ""


def content_policy(html: str) -> str:
    """A Content-Security-Policy that allows what is written in the page (by its hash), and requests to this server."""
    inline = _Inline()
    inline.feed(html.replace("\r\n", "\n"))
    inline.close()

    def hashes(texts: list[str]) -> str:
        digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
        return " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"

    return (
        f"default-src 'none'; script-src {hashes(inline.texts['script'])}; style-src {hashes(inline.texts['style'])}; "
        "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
