"""`PackedMask`: the attention mask of packed rows, which no one has to make.

[Note: Attention document by document]
A mask has one number for each pair of tokens of a row: 1 GiB for 32,768 tokens. In packed rows nearly all of them are
False, and sdpa attention still computes all pairs. So models of transformers that use sdpa attention are given a
`PackedMask`. They hand it on, as they do with every mask of four dimensions, to
``torch.nn.functional.scaled_dot_product_attention``, which is torch's way to ask a tensor of a class of its own. It is
answered in pieces:

* A long document is a piece, causal and without a mask: torch has its fastest kernels for that.
* Short documents that follow each other, up to `_GROUP_TOKENS` together, are a piece with a small mask of their own.
  Padding at the end of a row, in which each token is a document, is in such pieces, too.
* A long document of a layer with a sliding window is cut into parts at least as long as the window. A part attends to
  itself and to the part before.

Any other operation on the mask gets it as it is in transformers, made then: right, but large and slow.
"""

import logging
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from lightning_cxl.torch_private import plain_tensor_functions, tree_map, wrapper_tensor

log = logging.getLogger("lightning_cxl")
_GROUP_TOKENS = 256
_ABOUT_IT = frozenset({"size", "dim", "numel", "element_size", "is_floating_point", "__len__", "ndimension"})
_ABOUT_IT |= {"is_inference", "is_complex"}
_FIELDS = frozenset(
    {"shape", "dtype", "device", "ndim", "layout", "is_meta", "is_cpu", "is_cuda", "requires_grad", "is_leaf"}
    | {"_version", "is_sparse", "is_nested", "grad_fn", "grad"}
)
_ITSELF = frozenset({"detach", "clone", "contiguous"})
_told: set[str] = set()


class _Piece(NamedTuple):
    """Documents of a row that are computed together."""

    lengths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


class PackedMask(Tensor):
    """Bool ``(rows, 1, tokens, tokens)``: which keys a query sees. See [Note: Attention document by document]."""

    _lengths: Sequence[Sequence[int]]
    _window: int | None
    _all: Tensor | None
    _small: dict[Any, Tensor]

    @staticmethod
    def __new__(
        cls, lengths: Sequence[Sequence[int]], device: torch.device, *, window: int | None = None
    ) -> "PackedMask":
        """Make no mask.

        Args:
            window: how many tokens a token sees at most, itself included; None: all of its document.
        """
        tokens = sum(lengths[0])
        self: PackedMask = wrapper_tensor(cls, (len(lengths), 1, tokens, tokens), torch.bool, device)
        self._lengths, self._window, self._all, self._small = lengths, window, None, {}
        return self

    def made(self, operation: str) -> Tensor:
        """Return the whole mask; says once what asks for it."""
        if operation not in _told:
            _told.add(operation)
            log.info("The mask of packed rows is made as a whole: `%s` asks for it.", operation)
        if self._all is None:
            self._all = self.whole()
        return self._all

    def whole(self) -> Tensor:
        return torch.stack([self._visible(each) for each in self._lengths])[:, None]

    def _visible(self, lengths: Sequence[int]) -> Tensor:
        counts = torch.tensor(lengths, device=self.device)
        document = torch.repeat_interleave(torch.arange(len(lengths), device=self.device), counts)
        visible = (document[:, None] == document).tril()
        return visible if self._window is None else visible.triu(1 - self._window)

    def _kept(self, key: Any, lengths: Sequence[int], first_query: int = 0) -> Tensor:
        """Return a small mask for queries from `first_query` on; it is made once."""
        if key not in self._small:
            self._small[key] = self._visible(lengths)[first_query:]
        return self._small[key]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Return what ``scaled_dot_product_attention`` returns with this mask.

        Args:
            query: ``(rows, heads, tokens, width)``.
        """
        rows = []
        for lengths, *row in zip(self._lengths, *(torch.split(each, 1) for each in (query, key, value)), strict=True):
            pieces = list(_pieces(lengths))
            sizes = [piece.tokens for piece in pieces]
            # `split`, not slices: its backward puts gradients side by side, that of slices adds up whole tensors
            parts = zip(*(torch.split(each, sizes, 2) for each in row), strict=True)
            rows.append(torch.cat([self._of_piece(*each, options) for each in zip(pieces, parts, strict=True)], 2))
        return torch.cat(rows)

    def _of_piece(self, piece: _Piece, tensors: tuple[Tensor, Tensor, Tensor], options: dict[str, Any]) -> Tensor:
        attention, window = functional.scaled_dot_product_attention, self._window
        if len(piece.lengths) > 1 or (window is not None and window < piece.tokens <= _GROUP_TOKENS):
            return attention(*tensors, attn_mask=self._kept(piece.lengths, piece.lengths), **options)
        if window is None or piece.tokens <= window:
            return attention(*tensors, is_causal=True, **options)
        size = max(window, _GROUP_TOKENS)
        results: list[Tensor] = []
        before: tuple[Tensor, Tensor] | None = None
        for query, key, value in zip(*(torch.split(each, size, 2) for each in tensors), strict=True):
            keys, values = key, value
            if before is not None:
                keys, values = (torch.cat(both, 2) for both in zip(before, (key, value), strict=True))
            new, old = query.shape[2], keys.shape[2] - query.shape[2]
            mask = self._kept((new, old), [old + new], old)  # no group of documents is that long, or 0 tokens long
            results.append(attention(query, keys, values, attn_mask=mask, **options))
            before = key, value
        return torch.cat(results, 2)

    def _fits(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        rows, _, tokens, _ = self.shape
        return all(each.dim() == 4 and each.shape[::2] == (rows, tokens) for each in (query, key, value))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute attention in pieces; make the mask for what is not about its shape or place."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        named = func.__self__.__name__ if name in ("__get__", "__set__") else name
        if name in _ABOUT_IT or (name == "__get__" and named in _FIELDS):
            with plain_tensor_functions():
                return func(*args, **kwargs)
        if name in _ITSELF:
            return args[0]
        if func is functional.scaled_dot_product_attention:
            given = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False))
            given |= kwargs
            mask = given.pop("attn_mask", None)
            is_alone = isinstance(mask, cls) and mask._all is None and not given.pop("is_causal", False)
            if is_alone and mask._fits(given["query"], given["key"], given["value"]):
                return mask.attend(**given)
        args, kwargs = tree_map(lambda each: each.made(named) if isinstance(each, cls) else each, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # a class method, as torch's own tests have it
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map(
            lambda each: each.made(str(func)) if isinstance(each, cls) else each, (args, kwargs or {})
        )
        return func(*args, **kwargs)


def _pieces(lengths: Sequence[int]) -> Iterator[_Piece]:
    """Yield documents in their order: long ones alone, short neighbours together."""
    group: list[int] = []
    for length in lengths:
        if group and sum(group) + length > _GROUP_TOKENS:
            yield _Piece(tuple(group))
            group = []
        group.append(length)
    if group:
        yield _Piece(tuple(group))
