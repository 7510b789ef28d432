"""`ShardsOnSsd`: shards of one unit lie on SSD, and go to the device together when FSDP2 gathers them.

[Note: Shards on SSD]
With several processes, and a device apart, each process has its shards of a unit in one record, in folders of its own.
The record is a home as with one process ([Note: Weights on SSD]), and shards are as in [Note: Shards on the host]: what
they have on the host is the record's window.

* Gather. FSDP2 asks the shards of a unit one after the other. The first one brings the record to the device, through a
  slot of the host; each takes its part, and the last one lets go of the rest. The stream in which FSDP2 puts together
  what is gathered waits for the copy. The host waits for the read: a rank whose drive fails raises there, before it has
  asked for the gather.
* Ahead. A unit is read when FSDP2 asks for it, which is while the device computes the unit before: the host runs ahead
  in a forward, and FSDP2 fetches one unit ahead in a backward. Nothing is guessed.
* Updates visit the record, and write it ([Note: State on SSD]). No read is under way then: a gather has waited for its
  own. So nothing on the device is older than the record.
* Who writes to a shard waits for the record's write, and writes to private pages of the window. They are written to the
  record before it is gathered next, by the next update, or when they are many.
* When the run is over the shards stay in the window, and are copied from there.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lightning_cxl.sharding.host_shard import HostShard
from lightning_cxl.streaming.unit_weights import Home, aligned_nbytes
from lightning_cxl.torch_private import gathered_together, put_shard
from lightning_cxl.transfer.engine import TransferEngine


class ShardsOnSsd:
    """Moves shards to a record, and from there to the device. See [Note: Shards on SSD]."""

    def __init__(
        self, home: Home, engine: TransferEngine, model: nn.Module, parameters: Sequence[nn.Parameter]
    ) -> None:
        self._home = home
        self._engine = engine
        self._nbytes = 0
        self._shards: list[HostShard] = []
        self._together: dict[int, frozenset[int]] = {}
        """Where the shards begin that are gathered with one, by where that one begins."""
        self._arrived: torch.Tensor | None = None
        self._awaited: set[int] = set()  # where shards begin that have not taken their part of what has arrived
        self._is_written = False
        wanted = {id(parameter) for parameter in parameters}
        groups = [[each for each in group if id(each.sharded_param) in wanted] for group in gathered_together(model)]
        self._move(groups)

    @torch.no_grad()
    def _move(self, groups: Sequence[Sequence[Any]]) -> None:
        moved = []
        with self._home.filling() as memory:
            for group in groups:
                begins = []
                for managed in group:
                    shard: HostShard = managed.sharded_param._local_tensor
                    shard.settle()
                    filled, shown = (
                        place.slice(self._nbytes, shard.host.nbytes).tensor((shard.numel(),), shard.dtype)
                        for place in (memory, self._home.buffer)
                    )
                    filled.copy_(shard.host.reshape(-1))
                    moved.append((managed, shard, shown))
                    begins.append(self._nbytes)
                    self._nbytes += aligned_nbytes(shard.host)
                self._together |= dict.fromkeys(begins, frozenset(begins))
        for managed, shard, shown in moved:
            put_shard(managed, shard.lie_in(shown.view(shard.shape), self), shown)
            self._shards.append(shard)

    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        """Return the part of one shard; see `Drives`."""
        begin = host.data_ptr() - self._home.buffer.address
        if self._arrived is None or begin not in self._awaited:
            self._arrived = self._fetch()
            self._awaited = set(self._together[begin])
        part = self._arrived[begin : begin + host.nbytes].view(host.dtype).view(host.shape)
        self._awaited.discard(begin)
        if not self._awaited:
            self._arrived = None
        return part

    def _fetch(self) -> torch.Tensor:
        if self._is_written:
            self._home.looks_are_over()
            self._is_written = False
        arrived = torch.empty(self._nbytes, dtype=torch.uint8, device=self._engine.device)
        shown = self._home.buffer.tensor((self._nbytes,), torch.uint8)
        self._home.fetch(self._engine, shown, arrived, [self._engine.mark()]).wait()
        return arrived

    def settle(self) -> None:
        """Return when the window shows what was written last."""
        self._home.settle()

    def written(self) -> None:
        """Write what someone has written to the window, at the next gather at the latest."""
        self._is_written = True
        self._home.looked_at()

    def close(self) -> None:
        """Let shards be copied from the window, without the record's drives. Idempotent."""
        self._arrived = None
        for shard in self._shards:
            shard.leave(self)
