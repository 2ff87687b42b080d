"""Words that several layouts share: a decoder layer's keys, rotary scaling, proposals. Pure."""

from typing import Any

from drafter_service.checkpoint.rope_config import rope_parameters
from drafter_service.eagle3.config import Rope
from protos.errors import CheckpointError

SLIDING, FULL = "sliding_attention", "full_attention"


def refuse(layout: str, unsayable: dict[str, bool]) -> None:
    """Raises CheckpointError, naming every fact that is true and has no word in a layout."""
    found = [name for name, present in unsayable.items() if present]
    if found:
        raise CheckpointError(f"the {layout} layout has no word for {', '.join(found)}")


def old_rope_keys(rope: Rope) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`, as files from before `rope_parameters` say it."""
    scaling = {k: v for k, v in rope_parameters(rope).items() if k != "rope_theta"}
    return {
        "rope_theta": rope.theta,
        "rope_scaling": None if rope.kind == "default" else scaling,
        "rope_parameters": rope_parameters(rope),
    }


def proposals(algorithm: str, num_tokens: int, verifier_name: str) -> dict[str, Any]:
    """The `speculators_config` section."""
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {
                "accept_tolerance": 0.0,
                "proposal_type": "greedy",
                "speculative_tokens": num_tokens,
                "verifier_accept_k": 1,
            }
        ],
        "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": verifier_name},
    }
