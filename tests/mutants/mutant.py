"""`Mutant`: the code without one protection."""

from pathlib import Path
from typing import NamedTuple


class Mutant(NamedTuple):
    """A text of a file that is replaced by another one.

    Args:
        takes_away: the protection, in words; the mutant's name.
        file: relative to the root of the repository.
        old: occurs exactly once in the file.
        new: stands in its place.
        tests: arguments for pytest: the few tests of which one should notice.
    """

    takes_away: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def texts(self, root: Path) -> tuple[str, str]:
        """Return the file as it is, and as the mutant's.

        Raises:
            ValueError: the old text is not there exactly once: the list must follow the code.
        """
        text = (root / self.file).read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"`{self.takes_away}`: its text occurs {text.count(self.old)} times in {self.file}")
        return text, text.replace(self.old, self.new)

    def apply(self, root: Path) -> str:
        """Write the mutant's file; returns the text that was there. Raises as `texts`."""
        original, changed = self.texts(root)
        (root / self.file).write_text(changed)
        return original
