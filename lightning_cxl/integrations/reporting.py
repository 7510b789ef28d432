"""`Reporting`: how a strategy, of the Trainer or of Fabric, tells its users what their memory is used for."""

from typing import Any, Protocol

import torch

from lightning_cxl.run.session import Session


class _HasSession(Protocol):
    _session: Session

    @property
    def root_device(self) -> torch.device: ...


class Reporting:
    """Beside the class of the framework in the bases of a strategy, and before it."""

    def report(self: _HasSession) -> dict[str, Any]:
        """Return bytes planned, used and at the peak, per tier and role, JSON-able; see `Session.report`."""
        return self._session.report(self.root_device)

    def __str__(self: _HasSession) -> str:
        """Return the report as one screen of text."""
        return self._session.describe(type(self).__name__, self.root_device)

    def __repr__(self: _HasSession) -> str:
        """Return the class and the options that are not at their default."""
        return self._session.describe_options(type(self).__name__)
