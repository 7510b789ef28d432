"""`Loop`: what the framework's training loop, and the user's code in it, does around a step."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Loop:
    """What is known of the training loop before it starts; where nothing is known, the careful answer."""

    accumulates: bool = False
    """Several micro-batches are added up before a step, at some time of the run."""
    needs_whole_step: str | None = "the training loop is not known"
    """What may call a step off, or look at gradients, once the step's closure runs; None if nothing does."""
    reads_gradients: bool = True
    """Somebody may read gradients between the micro-batches of a step."""
    edits_gradients: bool = True
    """Somebody may write gradients between backward and step, perhaps through ``.data``."""
    writes_unseen: bool = False
    """Somebody may write weights between steps through ``.data``, which leaves no trace."""
