"""Random states of one rank: plain data out, the next draws back in.

Invariant: capturing and deriving change no state; restoring checks everything first, on fresh
generators of the same kinds, and only then changes any.

A state is ``{"global": {label: entry}, "named": {name: entry}}``, an entry ``{"kind": str,
"state": plain data}``. Labels are ``python``, ``numpy``, ``torch`` (CPU) and the device type of
the accelerator that this rank uses: the rank's current device only, because what other ranks use
is theirs to save, and asking another device for its state would open a context there.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fsdp_ckpt.errors import MismatchError, UnencodableStateError

__all__ = [
    "capture_random_state",
    "check_random_state",
    "derive_random_state",
    "isolated_random_state",
    "mix_words",
    "restore_random_state",
    "seed_random_state",
]

_MASK64 = (1 << 64) - 1


def capture_random_state(generators: Mapping[str, object]) -> dict[str, Any]:
    """Read every random state of this rank; each rank calls it for itself.

    Args:
        generators: The job's own by name: ``random.Random``, ``numpy.random.Generator`` or
            ``RandomState``, ``torch.Generator`` on any device.

    Returns:
        Plain data that shares no memory with the generators: dicts, tuples, str, int, float,
        ``None``, numpy arrays, uint8 CPU tensors. How often a numpy generator was spawned from is
        not part of its state.

    Raises:
        UnencodableStateError: A generator is of another kind.
    """
    return {
        section: {
            label: {"kind": stream.kind, "state": stream.read()}
            for label, stream in streams.items()
        }
        for section, streams in _streams_of(generators).items()
    }


def check_random_state(state: Mapping[str, Any], generators: Mapping[str, object]) -> None:
    """Raise what would keep `restore_random_state` from restoring ``state``; changes nothing.

    Raises:
        MismatchError: Missing, unknown or unreadable entries, or generators of another kind, all
            named.
        UnencodableStateError: A generator is of a kind that has no state to restore.
    """
    live = _streams_of(generators)
    problems = [f"section {s!r} is unknown" for s in state if s not in live]
    for section, streams in live.items():
        problems += _entry_problems(section, state.get(section), streams)
    if problems:
        raise MismatchError(
            f"random states do not restore: {'; '.join(problems)}: give the generators and devices "
            "of the saved run, or leave these states out"
        )


def restore_random_state(state: Mapping[str, Any], generators: Mapping[str, object]) -> None:
    """Put back what `capture_random_state` or `derive_random_state` returned.

    Nothing may be left over on either side: an accelerator or name that only the state or only
    this process has is a mismatch; take it out of ``state`` or ``generators`` to go on without.

    Raises:
        MismatchError: As `check_random_state`; no state has changed.
        UnencodableStateError: A generator is of a kind that has no state to restore.
    """
    check_random_state(state, generators)
    for section, streams in _streams_of(generators).items():
        for label, stream in streams.items():
            stream.write(state[section][label]["state"])


def derive_random_state(
    seed_material: int, rank: int, generators: Mapping[str, object]
) -> dict[str, Any]:
    """Make the state of a rank that did not exist when the checkpoint was saved.

    Args:
        seed_material: Non-negative, of any size, the same on all ranks: from the checkpoint.
        rank: Rank today. Ranks below 2**32 get distinct states, for each generator.
        generators: As for `capture_random_state`.

    Returns:
        A state as `capture_random_state` returns, for the same generators; none has changed.

    Raises:
        MismatchError: ``seed_material`` or ``rank`` is negative.
        UnencodableStateError: A generator is of another kind.

    Source: numpy.random.SeedSequence over ``seed_material`` with the generator's label as spawn
    key gives a 64-bit word; the rank is added to it.
    """
    if seed_material < 0 or rank < 0:
        raise MismatchError(
            f"seed_material {seed_material} and rank {rank} derive no state: expected 0 or more"
        )
    derived: dict[str, Any] = {}
    for section, streams in _streams_of(generators).items():
        derived[section] = {}
        for label, stream in streams.items():
            sequence = np.random.SeedSequence(
                seed_material, spawn_key=tuple(f"{section}/{label}".encode())
            )
            # Added and not hashed: torch's CPU generator uses the low 32 bits of a seed only, in
            # which hashes of 10,000 ranks would collide with a chance of 1 %.
            seed = (int(sequence.generate_state(1, np.uint64)[0]) + rank) & _MASK64
            derived[section][label] = {"kind": stream.kind, "state": stream.twin(seed).read()}
    return derived


def mix_words(*words: int) -> int:
    """Mix integers into one word of [0, 2**64); a bijection of the last for fixed others.

    Args:
        *words: Any integers, of which the low 64 bits count; order matters.

    Source: the finalizer of splitmix64, a bijection of 64-bit words (Steele, Lea and Flood, "Fast
    splittable pseudorandom number generators", OOPSLA 2014; constants from Vigna's splitmix64.c),
    chained: mix(mix(first) ^ second) and so on.
    """
    mixed = 0
    for word in words:
        mixed = ((mixed ^ (word & _MASK64)) + 0x9E3779B97F4A7C15) & _MASK64
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK64
        mixed ^= mixed >> 31
    return mixed


def seed_random_state(seed: int) -> None:
    """Seed python's, numpy's and torch's CPU global generators from one word, each differently."""
    # Python and numpy are the same algorithm: from one seed they would draw the same numbers.
    random.seed(mix_words(seed, 1))
    word = mix_words(seed, 2)
    np.random.seed([word & 0xFFFFFFFF, word >> 32])
    # torch.manual_seed would seed every accelerator too.
    torch.default_generator.manual_seed(mix_words(seed, 3))


@contextmanager
def isolated_random_state() -> Iterator[None]:
    """Put python's, numpy's and torch's CPU global states back at the end; about 0.1 ms."""
    states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.default_generator.set_state(states[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stream:
    """One generator, whatever its library calls its methods."""

    kind: str
    read: Callable[[], Any]
    write: Callable[[Any], object]
    twin: Callable[[int], _Stream]  # a fresh generator of the same kind, from a 64-bit seed


def _streams_of(generators: Mapping[str, object]) -> dict[str, dict[str, _Stream]]:
    """Return the live streams by section and label, the process's own under "global"."""
    process = {
        "python": _python_stream(random),
        "numpy": _numpy_legacy_stream(np.random),
        "torch": _torch_stream(torch.default_generator),
    }
    accelerator = _accelerator_stream()
    if accelerator is not None:
        process[accelerator[0]] = accelerator[1]
    return {
        "global": process,
        "named": {name: _named_stream(name, g) for name, g in generators.items()},
    }


def _named_stream(name: str, generator: object) -> _Stream:
    # SystemRandom is a Random without a state.
    if isinstance(generator, random.Random) and not isinstance(generator, random.SystemRandom):
        return _python_stream(generator)
    if isinstance(generator, np.random.Generator):
        return _numpy_stream(generator)
    if isinstance(generator, np.random.RandomState):
        return _numpy_legacy_stream(generator)
    if isinstance(generator, torch.Generator):
        return _torch_stream(generator)
    raise UnencodableStateError(
        f"generator {name!r} is of type {type(generator).__qualname__}, whose state cannot be "
        "saved: give a random.Random, numpy.random.Generator or torch.Generator",
        key=name,
    )


def _python_stream(source: Any) -> _Stream:
    """Wrap a ``random.Random``, or the module for its global one."""
    return _Stream(
        kind="random.Random",
        read=source.getstate,
        write=source.setstate,
        twin=lambda seed: _python_stream(random.Random(seed)),
    )


def _numpy_legacy_stream(source: Any) -> _Stream:
    """Wrap a ``numpy.random.RandomState``, or the module for its global one."""
    name = source.get_state(legacy=False)["bit_generator"]
    return _Stream(
        kind=f"numpy.random.RandomState({name})",
        read=lambda: source.get_state(legacy=False),
        write=source.set_state,
        twin=lambda seed: _numpy_legacy_stream(
            np.random.RandomState(getattr(np.random, name)(seed))
        ),
    )


def _numpy_stream(generator: np.random.Generator) -> _Stream:
    bits: Any = generator.bit_generator
    return _Stream(
        kind=f"numpy.random.Generator({type(bits).__name__})",
        read=lambda: bits.state,
        write=lambda state: setattr(bits, "state", state),
        twin=lambda seed: _numpy_stream(np.random.Generator(type(bits)(seed))),
    )


def _torch_stream(generator: torch.Generator) -> _Stream:
    device = generator.device
    return _Stream(
        kind=f"torch.Generator({device.type})",
        read=generator.get_state,
        write=generator.set_state,
        twin=lambda seed: _torch_stream(torch.Generator(device=device).manual_seed(seed)),
    )


def _accelerator_stream() -> tuple[str, _Stream] | None:
    """Return device type and default generator of this rank's current device.

    ``None`` without an accelerator, and before its first use: there is no state to read yet, and
    asking would open a context on a device which this rank may never use.
    """
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is None:
        return None
    module: Any = torch.get_device_module(device)
    if not getattr(module, "is_initialized", lambda: True)():
        return None
    return device.type, _Stream(
        kind=f"torch.Generator({device.type})",
        read=module.get_rng_state,
        write=module.set_rng_state,
        twin=lambda seed: _torch_stream(torch.Generator(device=device).manual_seed(seed)),
    )


def _entry_problems(section: str, saved: Any, streams: Mapping[str, _Stream]) -> list[str]:
    """List what keeps the entries of one section from being written to ``streams``."""
    if not isinstance(saved, Mapping):
        return [f"section {section!r} is missing"]
    problems = [f"{label!r} was saved and is not here" for label in saved if label not in streams]
    for label, stream in streams.items():
        entry = saved.get(label)
        if label not in saved:
            problems.append(f"{label!r} was not saved")
        elif not isinstance(entry, Mapping) or entry.keys() != {"kind", "state"}:
            problems.append(f"{label!r} is not an entry of kind and state")
        elif entry["kind"] != stream.kind:
            problems.append(f"{label!r} was a {entry['kind']}, now a {stream.kind}")
        else:
            try:
                stream.twin(0).write(entry["state"])
            # Any exception is the answer: what a bad state raises differs by library.
            except Exception as error:
                problems.append(f"{label!r} does not load ({type(error).__name__}: {error})")
    return problems
