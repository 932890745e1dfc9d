"""What an operator at a terminal sees when llmd is ready."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys

from llmd.config.convert import here
from llmd.config.resolve import default_run_dir
from llmd.plan.spec import Boot


def llmctl(boot: Boot) -> str:
    """`llmctl` as a shell finds it and it finds this llmd: with its path where PATH has another or none, with --socket where it would not look."""
    beside = os.path.join(os.path.dirname(sys.executable), "llmctl")
    found = shutil.which("llmctl")
    is_ours = found is not None and os.path.exists(beside) and os.path.samefile(found, beside)
    command = "llmctl" if is_ours or not os.path.exists(beside) else shlex.quote(os.path.relpath(beside) if _below_here(beside) else beside)
    if boot.ports.run_dir in ("/run/llmd", default_run_dir(os.environ)):
        return command
    return f"{command} --socket {shlex.quote(boot.args.admin.socket or str(boot.ports.admin_socket))}"


def _below_here(path: str) -> bool:
    directory = here()
    return bool(directory) and path.startswith(directory.rstrip("/") + "/")


def text(boot: Boot) -> str:
    """URL, model, version, and what to type next."""
    body = json.dumps({"model": boot.served_name, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 64})
    key = '-H "Authorization: Bearer $LLMD_API_KEY" ' if boot.args.http.api_keys_file else ""
    path, data = "/v1/chat/completions", shlex.quote(body)
    if not boot.files.has_chat_template and boot.args.model.chat_template is None:
        path, data = "/v1/completions", shlex.quote(json.dumps({"model": boot.served_name, "prompt": "Hello", "max_tokens": 64}))
    return f"""
  llmd is ready
    url      {boot.http_url}
    model    {boot.served_name}  (weights {boot.files.weights_version})
    control  {llmctl(boot)} status
    try      curl {boot.http_url}{path} -H 'Content-Type: application/json' {key}-d {data}

"""
