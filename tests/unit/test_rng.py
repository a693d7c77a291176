"""Random states: the next draws come back, and nothing moves that should not."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fsdp_ckpt.errors import MismatchError, UnencodableStateError
from fsdp_ckpt.state.rng import (
    capture_random_state,
    derive_random_state,
    isolated_random_state,
    mix_words,
    restore_random_state,
    seed_random_state,
)

BIT_GENERATORS = ["MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"]


def make_generators(seed: int = 0) -> dict[str, Any]:
    """One named generator of every kind that is supported."""
    return {
        "python": random.Random(seed),
        "torch": torch.Generator().manual_seed(seed),
        "legacy": np.random.RandomState(seed),
        **{name: np.random.Generator(getattr(np.random, name)(seed)) for name in BIT_GENERATORS},
    }


def draw_from(generator: Any) -> list[Any]:
    """Draw so that cached normals and half-used words count too."""
    if isinstance(generator, random.Random):
        return [generator.gauss(0, 1), generator.random()]
    if isinstance(generator, torch.Generator):
        return torch.randn(3, generator=generator).tolist()
    if isinstance(generator, np.random.RandomState):
        return [generator.standard_normal(), generator.randint(1 << 30)]
    return [
        generator.integers(1 << 32, dtype=np.uint32).item(),
        generator.random(),
        generator.standard_normal(),
    ]


def draw_all(generators: dict[str, Any]) -> dict[str, list[Any]]:
    draws = {f"named/{name}": draw_from(g) for name, g in generators.items()}
    draws["python"] = [random.gauss(0, 1), random.random()]
    draws["numpy"] = [np.random.standard_normal(), np.random.randint(1 << 30)]
    draws["torch"] = torch.randn(3).tolist()
    return draws


def plain(state: Any) -> Any:
    """Turn a state into nested lists that compare; fails on anything but plain data."""
    if isinstance(state, dict):
        assert all(type(key) is str for key in state)
        return [(key, plain(value)) for key, value in state.items()]
    if type(state) is tuple:
        return [plain(value) for value in state]
    if type(state) in (np.ndarray, torch.Tensor):
        assert type(state) is np.ndarray or (state.dtype, state.device.type) == (torch.uint8, "cpu")
        return state.tolist()
    assert state is None or type(state) in (int, float, str), type(state)
    return state


def test_restoring_reproduces_the_next_draws() -> None:
    """After a restore every generator draws what it drew after the capture, however often."""
    generators = make_generators()
    draw_all(generators)
    state = capture_random_state(generators)
    frozen = plain(state)
    draws = draw_all(generators)
    for seed in (1, 2):
        seed_random_state(seed)
        others = make_generators(seed)
        assert not any(draws[label] == other for label, other in draw_all(others).items())
        restore_random_state(state, others)
        assert draw_all(others) == draws
    assert plain(state) == frozen, "drawing must not reach into a captured state"


def test_capturing_and_deriving_change_nothing() -> None:
    """Reading every state, or making one for a new rank, moves no generator."""
    generators = make_generators()
    draw_all(generators)
    before = plain(capture_random_state(generators))
    derive_random_state(5, 3, generators)
    assert plain(capture_random_state(generators)) == before


def test_sections_and_labels() -> None:
    """A state names the process's generators, and the job's own by the names given."""
    state = capture_random_state({"augment": random.Random(0)})
    assert set(state) == {"global", "named"}
    assert {"python", "numpy", "torch"} <= set(state["global"])
    assert set(state["named"]) == {"augment"}
    assert state["global"]["numpy"]["kind"] == "numpy.random.RandomState(MT19937)"


def remove(section: str, label: str) -> Callable[[dict[str, Any]], object]:
    return lambda state: state[section].pop(label)


def put(section: str, label: str, value: Any) -> Callable[[dict[str, Any]], object]:
    return lambda state: state[section][label].update(state=value)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (remove("global", "torch"), "'torch' was not saved"),
        (remove("named", "Philox"), "'Philox' was not saved"),
        (lambda s: s["named"].update(extra=s["named"]["python"]), "'extra' was saved"),
        (lambda s: s["global"].update(tpu=s["global"]["torch"]), "'tpu' was saved"),
        (
            lambda s: s["named"].update(PCG64=s["named"]["PCG64DXSM"]),
            r"PCG64DXSM\), now a .*PCG64\)",
        ),
        (
            lambda s: s["named"].update(torch=s["named"]["python"]),
            "was a random.Random, now a torch",
        ),
        (lambda s: s.pop("named"), "section 'named' is missing"),
        (lambda s: s.update(more={}), "section 'more' is unknown"),
        (lambda s: s["named"].update(legacy=1), "'legacy' is not an entry"),
        (put("global", "python", [3, [], None]), "'python' does not load"),
        (put("global", "numpy", {"bit_generator": "MT19937"}), "'numpy' does not load"),
        (put("global", "torch", torch.zeros(7, dtype=torch.uint8)), "'torch' does not load"),
        (put("named", "SFC64", {"bit_generator": "SFC64"}), "'SFC64' does not load"),
        (put("named", "MT19937", None), "'MT19937' does not load"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(
    damage: Callable[[dict[str, Any]], object], words: str
) -> None:
    """Whatever is missing, extra, of another kind or unreadable is found before any change."""
    generators = make_generators()
    state = copy.deepcopy(capture_random_state(generators))
    damage(state)
    draw_all(generators)
    before = plain(capture_random_state(generators))
    with pytest.raises(MismatchError, match=words):
        restore_random_state(state, generators)
    assert plain(capture_random_state(generators)) == before


def test_mismatches_are_all_named() -> None:
    """One error names every generator that does not fit, in one line."""
    state = capture_random_state({"a": random.Random(0), "b": np.random.default_rng(0)})
    with pytest.raises(MismatchError) as caught:
        restore_random_state(state, {"b": torch.Generator(), "c": random.Random(0)})
    message = str(caught.value)
    assert "'a' was saved and is not here" in message
    assert "'b' was a numpy.random.Generator(PCG64), now a torch.Generator(cpu)" in message
    assert "'c' was not saved" in message
    assert "\n" not in message


@pytest.mark.parametrize("generator", [random.SystemRandom(), object(), np.random.PCG64(1)])
def test_generators_without_a_state_are_refused(generator: object) -> None:
    """What cannot be saved is refused by name, when capturing as when restoring."""
    for call in (
        lambda: capture_random_state({"odd": generator}),
        lambda: derive_random_state(0, 0, {"odd": generator}),
        lambda: restore_random_state(capture_random_state({}), {"odd": generator}),
    ):
        with pytest.raises(UnencodableStateError, match="'odd'") as caught:
            call()
        assert caught.value.key == "odd"


def test_derived_states_are_distinct_and_repeatable() -> None:
    """Every rank and generator gets a stream of its own, the same whenever it is derived."""
    generators = make_generators() | {"torch2": torch.Generator(), "python2": random.Random()}

    def draws(material: int, rank: int) -> dict[str, list[Any]]:
        with isolated_random_state():
            restore_random_state(derive_random_state(material, rank, generators), generators)
            return draw_all(generators)

    first = draws(2**200 + 1, 4)
    seed_random_state(9)
    draw_all(generators)
    assert draws(2**200 + 1, 4) == first
    every = [draws(material, rank) for material in (2**200 + 1, 2) for rank in (0, 1, 2, 4)]
    values = [str(value) for one in every for value in one.values()]
    assert len(values) == 8 * 13
    assert len(set(values)) == len(values)


def test_derived_torch_states_differ_in_the_bits_that_count() -> None:
    """Ranks differ in torch's CPU state even though it uses 32 bits of a seed."""
    states = [derive_random_state(1, rank, {})["global"]["torch"]["state"] for rank in range(300)]
    assert len({bytes(state.tolist()) for state in states}) == 300


def test_negative_material_is_refused() -> None:
    """A negative rank or seed is an error of ours, not numpy's."""
    for material, rank in ((-1, 0), (0, -1)):
        with pytest.raises(MismatchError, match="expected 0 or more"):
            derive_random_state(material, rank, {})


def test_isolation_puts_states_back_after_an_error_too() -> None:
    """Whatever happens inside, the three global states are as before."""
    draw_all({})
    before = plain(capture_random_state({}))

    def fail() -> None:
        with isolated_random_state():
            seed_random_state(3)
            draw_all({})
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert plain(capture_random_state({})) == before


def test_mixing_is_splitmix64() -> None:
    """The finalizer gives the published outputs, is chained, and tells all words apart."""
    # splitmix64.c started with state 0 and with its own increment: its first two outputs.
    assert mix_words(0) == 0xE220A8397B1DCDAF
    assert mix_words(0x9E3779B97F4A7C15) == 0x6E789E6AA1B965F4
    assert mix_words(1, 2) == mix_words(mix_words(1) ^ 2)
    assert mix_words(1, 2) != mix_words(2, 1)
    assert len({mix_words(7, word) for word in range(-1000, 1000)}) == 2000


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_an_accelerator_in_use_is_restored() -> None:
    """The current device's generator is captured under its type, derived, and draws again."""
    device = torch.accelerator.current_accelerator()
    assert device is not None
    torch.randn(3, device=device)
    named = {"noise": torch.Generator(device=device).manual_seed(1)}
    state = capture_random_state(named)
    plain(state)

    def draws() -> tuple[list[float], list[float]]:
        own = torch.randn(3, device=device, generator=named["noise"])
        return torch.randn(3, device=device).tolist(), own.tolist()

    expected = draws()
    derived = derive_random_state(1, 2, named)
    assert draws() != expected
    restore_random_state(state, named)
    assert draws() == expected
    restore_random_state(derived, named)
    assert draws() != expected
