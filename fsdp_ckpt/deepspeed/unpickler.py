"""The pickle inside a torch file, read without running anything that it names.

Invariant: a global becomes what stands for it in a table of this module, or is refused by its name, and only
what stands in the table is ever called. Tensors become where they lie; objects of DeepSpeed become their
attributes. Memory grows with the pickle's bytes, never with numbers that it claims.

This is the only module that imports :mod:`pickle`, of which it takes the interpreter written in Python: its
memo is a dict, where the one in C allocates as much as an index says.
"""

from __future__ import annotations

import io
import math
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from fsdp_ckpt.errors import CheckpointError, CorruptCheckpointError, UnencodableStateError
from fsdp_ckpt.manifest.strict_json import brief
from fsdp_ckpt.plan.dtypes import itemsize

__all__ = ["Inert", "StoredTensor", "read_pickle"]

# Leaves that containers would come to if what stands in several places were written out in each.
MAX_NODES = 20_000_000

Locate = Callable[[str, int], int]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file.

    Args:
        dtype: Name of format version 1.
        shape: Its shape.
        byte_offset: Start in the file, in bytes.
        is_row_major: Whether its elements lie there in order, without gaps.
    """

    dtype: str
    shape: tuple[int, ...]
    byte_offset: int
    is_row_major: bool = True

    @property
    def num_elements(self) -> int:
        """Product of the shape."""
        return math.prod(self.shape)


@dataclass(slots=True)
class Inert:
    """An object that was not made.

    Args:
        attributes: What it would have held.
    """

    attributes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Storage:
    dtype: str
    byte_offset: int
    num_elements: int


def read_pickle(data: bytes, where: str, locate: Locate) -> Any:
    """Read a ``data.pkl``.

    Args:
        data: The whole pickle.
        where: The file, for errors.
        locate: (key of a storage, its bytes) → where it starts in the file.

    Raises:
        UnencodableStateError: It names something beyond tensors, plain containers and DeepSpeed's own types.
        CorruptCheckpointError: Malformed, or a tensor does not lie in its storage.
    """
    try:
        content = _Reader(data, where, locate).load()
        _count_nodes(content, {})
    except CheckpointError as e:
        if where in str(e):
            raise
        raise CorruptCheckpointError(
            f"{where}: malformed pickle ({brief(e)}); copy the file anew, or take another tag",
            key=where,
        ) from e
    except Exception as e:  # a malformed pickle fails in any way there is
        raise CorruptCheckpointError(
            f"{where}: malformed pickle ({type(e).__name__}: {brief(e)}); copy the file anew, or take "
            "another tag",
            key=where,
        ) from e
    return content


class _Reader(pickle._Unpickler):
    dispatch: ClassVar[dict[int, Callable[[Any], None]]]

    def __init__(self, data: bytes, where: str, locate: Locate) -> None:
        super().__init__(io.BytesIO(data))
        self._where = where
        self._locate = locate

    def find_class(self, module_name: str, global_name: str) -> Any:
        try:
            return _GLOBALS[module_name, global_name]
        except KeyError:
            raise UnencodableStateError(
                f"{self._where}: names {module_name[:80]}.{global_name[:80]}, and only tensors, plain "
                "containers and DeepSpeed's own types are read, since anything else could run code; save "
                "again without it (client_state is the place to look)",
                key=self._where,
            ) from None

    def persistent_load(self, pid: Any) -> _Storage:
        kind, storage_class, key, _, num_elements = pid
        if kind != "storage" or type(storage_class) is not _StorageClass:
            raise CorruptCheckpointError(f"{self._where}: a persistent id that is not a storage's")
        num_bytes = _count(num_elements) * itemsize(storage_class.dtype)
        byte_offset = self._locate(str(key), num_bytes) if num_bytes else 0
        return _Storage(storage_class.dtype, byte_offset, num_elements)

    def load_reduce(self) -> None:
        stack: list[Any] = self.stack  # type: ignore[attr-defined]  # the interpreter's, untyped
        arguments = stack.pop()
        function = stack[-1]
        if not any(function is known for known in _CALLED):
            raise CorruptCheckpointError(f"{self._where}: calls something that is no function")
        stack[-1] = function(*arguments)

    def load_newobj(self) -> None:
        stack: list[Any] = self.stack  # type: ignore[attr-defined]
        if stack.pop() != () or stack[-1] is not Inert:
            raise CorruptCheckpointError(f"{self._where}: makes an object of a class that has none")
        stack[-1] = Inert()

    def load_build(self) -> None:
        stack: list[Any] = self.stack  # type: ignore[attr-defined]
        state = stack.pop()
        if type(stack[-1]) is OrderedDict:
            return  # attributes, such as the metadata of a module's state dict
        if type(stack[-1]) is not Inert or type(state) is not dict:
            raise CorruptCheckpointError(f"{self._where}: sets attributes where there are none")
        stack[-1].attributes.update(state)


# What torch writes, in protocol 2 and later. Missing: opcodes that import by number, call classes in older
# ways, or share buffers.
_OPCODES = (
    "PROTO FRAME STOP MARK POP POP_MARK DUP NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 "
    "LONG4 FLOAT BINFLOAT BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8 "
    "EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST LIST APPEND APPENDS EMPTY_DICT DICT SETITEM SETITEMS "
    "EMPTY_SET ADDITEMS FROZENSET GET BINGET LONG_BINGET PUT BINPUT LONG_BINPUT MEMOIZE GLOBAL "
    "STACK_GLOBAL BINPERSID"
)
_codes = [getattr(pickle, name)[0] for name in _OPCODES.split()]
_Reader.dispatch = {code: pickle._Unpickler.dispatch[code] for code in _codes} | {
    pickle.REDUCE[0]: _Reader.load_reduce,
    pickle.NEWOBJ[0]: _Reader.load_newobj,
    pickle.BUILD[0]: _Reader.load_build,
}


def _count_nodes(value: Any, known: dict[int, int]) -> int:
    """Refuse containers that hold themselves, or that are small only because they share what they hold."""
    kind = type(value)
    if kind is Inert:
        value = value.attributes
    elif kind not in (dict, OrderedDict, list, tuple, set, frozenset):
        return 1
    if id(value) not in known:
        known[id(value)] = MAX_NODES  # for whoever meets it inside itself
        children = [*value, *value.values()] if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_count_nodes(child, known) for child in children)
    if known[id(value)] >= MAX_NODES:
        raise CorruptCheckpointError("containers that hold themselves, or each other too often")
    return known[id(value)]


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**62:
        raise CorruptCheckpointError("a size or position that is none")
    return value


@dataclass(frozen=True, slots=True)
class _StorageClass:
    dtype: str


def _rebuild_tensor(
    storage: _Storage, start: int, shape: Sequence[int], strides: Sequence[int], *_: Any
) -> StoredTensor:
    """What ``torch._utils._rebuild_tensor_v2`` does, to places."""
    shape, strides = tuple(map(_count, shape)), tuple(map(_count, strides))
    num_elements = math.prod(shape)
    dense = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    is_row_major = len(strides) == len(shape) and (
        not num_elements
        or all(n == 1 or a == b for n, a, b in zip(shape, strides, dense, strict=True))
    )
    if is_row_major and num_elements and _count(start) + num_elements > storage.num_elements:
        raise CorruptCheckpointError(
            f"a tensor of {num_elements} elements at {start} in a storage of {storage.num_elements}"
        )
    byte_offset = storage.byte_offset + start * itemsize(storage.dtype)
    return StoredTensor(storage.dtype, shape, byte_offset, is_row_major)


def _rebuild_from_type(
    function: object, kind: Any, arguments: Any, attributes: Any
) -> StoredTensor:
    """What ``torch._tensor._rebuild_from_type_v2`` does; the attributes are left out."""
    if function is not _rebuild_tensor or type(arguments) is not tuple:
        raise CorruptCheckpointError("a tensor that is made in another way")
    storage, start, shape, strides, *_ = arguments
    return _rebuild_tensor(storage, start, shape, strides)


def _take_tensor(tensor: StoredTensor, *_: Any) -> StoredTensor:
    return tensor


def _encode(text: str, encoding: str) -> bytes:
    """How protocol 2 writes bytes."""
    if encoding != "latin1":
        raise CorruptCheckpointError("bytes in another encoding")
    return text.encode("latin1")


def _make_set(values: Sequence[Any] = ()) -> set[Any]:
    return set(values)


def _make_frozenset(values: Sequence[Any] = ()) -> frozenset[Any]:
    return frozenset(values)


def _make_ordered(pairs: Sequence[Any] = ()) -> OrderedDict[Any, Any]:
    return OrderedDict(pairs)


def _make_size(sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(map(_count, sizes))


def _make_stage(value: int) -> int:
    return _count(value)


_DTYPES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
    "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
}  # fmt: skip
_STORAGES = {
    "Bool": "BOOL", "Byte": "U8", "Char": "I8", "Short": "I16", "Int": "I32", "Long": "I64",
    "Half": "F16", "BFloat16": "BF16", "Float": "F32", "Double": "F64",
}  # fmt: skip
_FUNCTIONS: Mapping[tuple[str, str], Callable[..., Any]] = {
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): _take_tensor,
    ("torch._tensor", "_rebuild_from_type_v2"): _rebuild_from_type,
    ("torch", "Size"): _make_size,
    ("collections", "OrderedDict"): _make_ordered,
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"): _make_stage,
    ("_codecs", "encode"): _encode,
    **{(module, "set"): _make_set for module in ("builtins", "__builtin__")},
    **{(module, "frozenset"): _make_frozenset for module in ("builtins", "__builtin__")},
}
_CALLED = tuple(_FUNCTIONS.values())
_GLOBALS: Mapping[tuple[str, str], Any] = {
    **_FUNCTIONS,
    **{("torch", f"{name}Storage"): _StorageClass(dtype) for name, dtype in _STORAGES.items()},
    # As text: what is plain can be saved.
    **{("torch", name): f"torch.{name}" for name in _DTYPES},
    ("torch", "Tensor"): None,
    ("torch.nn.parameter", "Parameter"): None,
    ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"): Inert,
    ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"): Inert,
    ("deepspeed.utils.tensor_fragment", "fragment_address"): Inert,
}
