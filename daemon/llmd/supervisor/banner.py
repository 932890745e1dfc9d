"""What an operator at a terminal sees when llmd is ready."""

from __future__ import annotations

import json
import shlex

from llmd.plan.spec import Boot


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
    watch    llmctl top
    control  llmctl status
    try      curl {boot.http_url}{path} -H 'Content-Type: application/json' {key}-d {data}

"""
