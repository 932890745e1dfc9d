"""Public clients of OpenAI's API as their users run them, one at a time: `python -m tests.clients NAME URL`.

Each gives, as JSON: what a plain call brought, what a streamed one brought (joined), and the error of a call for a model that is not
there. They run in processes of their own: their imports take seconds, warn of their own business and leave connections open.
The dummy model answers with the prompt, over and over.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

MODEL = "dummy"
PROMPT = "Say hello to all of them"
TOKENS = 60
#: What instructor is to find in an answer, and where the answer is to end.
FENCED, END = '```json\n{"name": "Ann", "age": 7}\n```', "@@"

Result = dict[str, str]


def openai(url: str) -> Result:
    import openai

    client = openai.OpenAI(base_url=url, api_key="none")
    ask: dict[str, Any] = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": TOKENS, "temperature": 0}
    plain = client.chat.completions.create(model=MODEL, **ask).choices[0].message.content
    pieces = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(model=MODEL, stream=True, **ask)]
    return result(plain, pieces, lambda: client.chat.completions.create(model="absent", **ask))


def litellm(url: str) -> Result:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks its makers for prices
    import litellm

    def ask(model: str, **more: Any) -> Any:
        messages = [{"role": "user", "content": PROMPT}]
        return litellm.completion(model=f"openai/{model}", api_base=url, api_key="none", messages=messages, max_tokens=TOKENS, temperature=0, **more)

    plain = ask(MODEL).choices[0].message.content
    pieces = [chunk.choices[0].delta.content or "" for chunk in ask(MODEL, stream=True, stream_options={"include_usage": True}) if chunk.choices]
    return result(plain, pieces, lambda: ask("absent"))


def langchain(url: str) -> Result:
    from langchain_openai import ChatOpenAI

    def chat(model: str) -> Any:
        return ChatOpenAI(model=model, base_url=url, api_key="none", max_tokens=TOKENS, temperature=0)  # type: ignore[arg-type, call-arg]

    pieces = [piece.content for piece in chat(MODEL).stream(PROMPT)]
    return result(chat(MODEL).invoke(PROMPT).content, pieces, lambda: chat("absent").invoke(PROMPT))


def instructor(url: str) -> Result:
    import instructor
    from openai import OpenAI
    from pydantic import BaseModel

    class Person(BaseModel):
        name: str
        age: int

    client = instructor.from_openai(OpenAI(base_url=url, api_key="none", max_retries=0), mode=instructor.Mode.MD_JSON)
    messages: Any = [{"role": "system", "content": FENCED + END}, {"role": "user", "content": "Who is it?"}]
    ask: dict[str, Any] = {"response_model": Person, "messages": messages, "temperature": 0, "stop": END, "max_retries": 1}
    plain = client.chat.completions.create(model=MODEL, **ask).model_dump_json()
    partial = [person.model_dump_json() for person in client.chat.completions.create_partial(model=MODEL, **ask)]
    return result(plain, partial[-1:], lambda: client.chat.completions.create(model="absent", **ask))


def llm(url: str) -> Result:
    """The command line of the package `llm`."""
    with tempfile.TemporaryDirectory() as directory:
        models = [{"model_id": name, "model_name": name, "api_base": url, "api_key_name": "none"} for name in (MODEL, "absent")]
        (Path(directory) / "extra-openai-models.yaml").write_text(json.dumps(models))
        command = [str(Path(sys.executable).with_name("llm")), "prompt", PROMPT, "-o", "max_tokens", str(TOKENS), "--key", "none", "-m"]
        env = os.environ | {"LLM_USER_PATH": directory}

        def run(*arguments: str) -> str:
            done = subprocess.run([*command, *arguments], env=env, capture_output=True, text=True, timeout=90)
            if done.returncode:
                raise RuntimeError(done.stderr)
            return done.stdout.removesuffix("\n")

        return result(run(MODEL, "--no-stream"), [run(MODEL)], lambda: run("absent"))


def result(plain: str | None, pieces: list[str], failing: Callable[[], object]) -> Result:
    """Gather a client's three calls."""
    try:
        failing()
    except Exception as error:
        return {"plain": plain or "", "streamed": "".join(pieces), "error": f"{type(error).__name__}: {error}"}
    raise AssertionError("a model that is not there was served")


CLIENTS: dict[str, Callable[[str], Result]] = {call.__name__: call for call in (openai, litellm, langchain, instructor, llm)}

if __name__ == "__main__":
    print(json.dumps(CLIENTS[sys.argv[1]](sys.argv[2])))
