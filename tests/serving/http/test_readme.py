"""The client examples of README.md, as they stand there, against a tiny model."""

from __future__ import annotations

import json
import re
import shlex

import pytest

from tests.conftest import ROOT
from tests.serving.http.conftest import events

ADDRESS = "http://127.0.0.1:8000"
SECTION = (ROOT / "README.md").read_text().partition("#### Client examples\n")[2].partition("\n#### ")[0]
CURLS = [shlex.split(text) for text in re.findall(r"^ {4}(curl .*?\}')$", SECTION, re.MULTILINE | re.DOTALL)]
(PYTHON,) = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)


@pytest.mark.parametrize("words", CURLS, ids=["chat", "completion"])
def test_curl(client, words):
    (url,) = (word for word in words if word.startswith(ADDRESS))
    header, body = words[words.index("-H") + 1], words[words.index("-d") + 1]
    name, _, value = header.partition(": ")
    response = client.post(url.removeprefix(ADDRESS), content=body, headers={name: value})
    assert response.status_code == 200, response.text
    if json.loads(body).get("stream"):
        assert "-N" in words and events(response)[-1] == "[DONE]"
    else:
        assert response.json()["choices"][0]["message"]["content"]


def test_python(live, capsys):
    names: dict = {}
    exec(PYTHON.replace(ADDRESS, live), names)
    with names["client"]:
        answer = names["answer"]
        out = capsys.readouterr().out
        assert out.endswith(f"{answer.choices[0].message.content}\n{answer.dspark['summary']}\n")
        assert answer.dspark["summary"]["rounds"] > 0 and len(answer.choices[0].logprobs.content[0].top_logprobs) == 2
