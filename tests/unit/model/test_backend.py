"""A target attends by the backend asked for; one that does not work is not used."""

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

from protos.errors import ConfigError
from tests.tiny import write_tiny
from tests.unit.model.family_cases import FAMILIES, VOCAB
from tests.unit.model.stepping import NUM_SLOTS, greedy, paged
from verifier_service.model import backend, load
from verifier_service.model.backend import Attention, with_backend
from verifier_service.model.load import load_target

PROMPT = list(range(60, 130))


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch):
    """torch's own definition of the kernel instead of a compiled one."""
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(backend, "compiled_flex", lambda: torch_flex.flex_attention)


@pytest.mark.parametrize("fuse", [True, False], ids=["fused", "modules"])
def test_greedy_ids_through_flex_equal_those_through_tiles(tiny_dirs, tiny_target, fuse):
    tiles = tiny_target("llama", torch.float32, fuse)
    flex = load_target(tiny_dirs["llama"], torch.float32, fuse=fuse, attention=Attention.FLEX)
    flex.allocate(NUM_SLOTS)
    assert greedy(flex, PROMPT, 8) == greedy(tiles, PROMPT, 8)


def test_a_target_with_flex_says_that_it_is_not_invariant(tiny_dirs, tiny_target):
    flex = load_target(tiny_dirs["llama"], torch.float32, attention=Attention.FLEX).facts
    tiles = tiny_target("llama", torch.float32).facts
    assert tiles.invariant
    assert not flex.invariant
    assert "FlexAttention" in flex.invariance_note
    assert flex.fingerprint != tiles.fingerprint
    assert flex.digest == tiles.digest


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt_oss"])
def test_windows_caps_and_sinks_reach_flex(name, tmp_path):
    path = write_tiny(FAMILIES[name].config(), tmp_path, seed=0)
    ids = torch.randint(VOCAB, (100,), generator=torch.Generator().manual_seed(0)).tolist()
    request = paged(ids, page=16, high=1024)
    found = []
    for attention in (Attention.TILES, Attention.FLEX):
        target = load_target(path, torch.float32, attention=attention)
        target.allocate(1024)
        found.append([target.forward([request.span(a, b)]) for a, b in ((0, 70), (70, 100))])
    for tiles, flex in zip(*found, strict=True):
        torch.testing.assert_close(flex, tiles, rtol=1e-4, atol=1e-4)


def no_kernel(*args: object, **kwargs: object) -> torch.Tensor:
    raise RuntimeError("no kernel image\nand more")


def wrong(*args: object, **kwargs: object) -> torch.Tensor:
    return torch_flex.flex_attention(*args, **kwargs) + 0.5


def not_finite(*args: object, **kwargs: object) -> torch.Tensor:
    return torch_flex.flex_attention(*args, **kwargs) * float("nan")


@pytest.mark.parametrize(
    ("flex", "words"),
    [(no_kernel, "no kernel image"), (wrong, "off where"), (not_finite, "nan off")],
)
def test_a_kernel_that_fails_is_refused_where_asked_for(monkeypatch, tiny_dirs, flex, words):
    monkeypatch.setattr(backend, "compiled_flex", lambda: flex)
    with pytest.raises(ConfigError, match=words):
        load_target(tiny_dirs["llama"], torch.float32, attention=Attention.FLEX)


def test_a_gpu_gets_flex_when_it_works_and_tiles_when_it_does_not(monkeypatch, tiny_dirs, caplog):
    # The choice only, with targets that are on the CPU.
    def chosen(asked, device):
        def make(own):
            target = load_target(tiny_dirs["llama"], torch.float32, attention=Attention.TILES)
            names[id(target)] = own.name
            kept.append(target)
            return target

        names, kept = {}, []
        found = with_backend(asked, device, torch.float32, make, lambda: "not asked for")
        return names[id(found)]

    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(backend, "fault_of", lambda flexed, tiled: "")
    assert chosen(Attention.AUTO, gpu) == "flex"
    monkeypatch.setattr(backend, "fault_of", lambda flexed, tiled: "it is slow")
    assert chosen(Attention.AUTO, gpu) == "tiles"
    assert "attends in tiles: it is slow" in caplog.text
    assert chosen(Attention.AUTO, torch.device("cpu")) == "tiles"
    assert chosen(Attention.TILES, gpu) == "tiles"


CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("units", "dtype", "fault", "expected"),
    [
        ("avx512+amx_bf16", torch.bfloat16, "", "sdpa"),
        ("avx512+amx_bf16", torch.bfloat16, "a row differs", "tiles"),
        ("avx512", torch.bfloat16, "", "tiles"),
        ("avx512+amx_bf16", torch.float32, "", "tiles"),
    ],
)
def test_matrix_units_get_the_fused_kernel_when_it_keeps_rows_apart(
    monkeypatch, tiny_target, caplog, units, dtype, fault, expected
):
    monkeypatch.setattr(backend, "vector_units", lambda: units)
    made = []

    def make(own):
        made.append(own.name)
        return tiny_target("llama", torch.float32)

    with_backend(Attention.AUTO, CPU, dtype, make, lambda: fault)
    assert made == [expected]
    assert (f"attends in tiles: {fault}" in caplog.text) == bool(fault)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3"])
def test_greedy_ids_through_the_fused_kernel_equal_those_through_tiles(monkeypatch, name, tmp_path):
    """In float32, where the two differ in last bits only; a tiny model's ids do not."""
    monkeypatch.setattr(load, "fault_of_kernel", lambda shape, dtype: "")
    path = write_tiny(FAMILIES[name].config(), tmp_path, seed=0)
    found = []
    for attention in (Attention.TILES, Attention.SDPA):
        target = load_target(path, torch.float32, attention=attention)
        target.allocate(NUM_SLOTS)
        found.append((greedy(target, PROMPT, 12), target.facts.fingerprint))
    assert found[0][0] == found[1][0]
    assert found[1][1] == f"{found[0][1]}-sdpa"


def test_the_fused_kernel_is_refused_where_asked_for_and_not_to_be_used(monkeypatch, tiny_dirs):
    directory = tiny_dirs["llama"]
    with pytest.raises(ConfigError, match="Llama-shaped"):
        load_target(directory, torch.float32, fuse=False, attention=Attention.SDPA)
    monkeypatch.setattr(load, "fault_of_kernel", lambda shape, dtype: "rows differ")
    with pytest.raises(ConfigError, match="sdpa cannot be used here: rows differ"):
        load_target(directory, torch.float32, attention=Attention.SDPA)
