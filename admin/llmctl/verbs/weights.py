"""Show the weights that are served: their version, as it stands in answers (`system_fingerprint`, X-Llmd-Weights), where they are, and what they are."""

from __future__ import annotations

from llmctl import exits
from llmctl.context import Context
from llmctl.output import size


def run(context: Context) -> int:
    weights = context.get("/v1/weights")
    if not context.out.is_table:
        context.out.data(weights)
        return exits.OK
    context.out.facts(
        [
            ("version", str(weights.get("weights_version") or "")),
            ("model", str(weights.get("name") or "")),
            ("path", str(weights.get("path") or "")),
            ("kind", f"{weights.get('kind')}, {weights.get('architecture')}, {weights.get('quantization')}"),
            ("size", size(weights.get("weights_bytes"))),
            ("context", f"{weights.get('context_length')} tokens"),
        ]
    )
    return exits.OK
