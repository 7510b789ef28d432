"""`MachineLinks`: how the devices of one machine reach host memory together, each other, and other machines."""

import math
from dataclasses import dataclass

from lightning_cxl.errors import ConfigError
from lightning_cxl.machine.reader import Rate


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineLinks:
    """What several devices share. Speeds are those of one direction while the other one is as busy."""

    devices_per_port: int = 1
    """Devices behind one root port or switch, whose way to host memory they share."""
    port_bytes_per_s: Rate | None = None
    """Of that way; None: devices do not slow down each other there."""
    peer_bytes_per_s: Rate | None = None
    """What each device sends, and receives, while all devices of the machine exchange data over NVLink or PCIe. None:
    there is no such way, or its speed is not known; what devices exchange then goes through host memory."""
    peer_latency_s: float = 0.0
    """Of one step of a ring of devices."""
    network_bytes_per_s: Rate | None = None
    """What the machine sends to other machines, and receives, over all of its adapters. None: not known."""
    network_latency_s: float = 0.0
    """Of one step of a ring of machines."""
    sockets: int = 1
    """Over which host memory and devices are spread evenly."""
    socket_bytes_per_s: Rate | None = None
    """What a socket receives from the others; None: memory of another socket is as near."""

    def __post_init__(self) -> None:
        """Refuse links that no machine has."""
        if self.devices_per_port < 1 or self.sockets < 1:
            raise ConfigError(
                f"links: devices_per_port and sockets must be at least 1, got {self.devices_per_port} and "
                f"{self.sockets}"
            )
        for name in ("port_bytes_per_s", "peer_bytes_per_s", "network_bytes_per_s", "socket_bytes_per_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"links: {name} must be a positive number, or left out, got {value!r}")
        for name in ("peer_latency_s", "network_latency_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"links: {name} must not be negative, got {getattr(self, name)}")
        if self.devices_per_port > 1 and self.port_bytes_per_s is None:
            raise ConfigError(
                f"links: {self.devices_per_port} devices share a port, and port_bytes_per_s does not say how fast it is"
            )
        if self.sockets > 1 and self.socket_bytes_per_s is None:
            raise ConfigError(
                f"links: there are {self.sockets} sockets, and socket_bytes_per_s does not say how fast one reads the "
                f"memory of another"
            )
