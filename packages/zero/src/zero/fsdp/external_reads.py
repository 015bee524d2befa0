"""Units whose parameters are read by modules that do not call the parameters' module.

Note [Parameters that other modules read]
Some modules read the parameter of another module without calling it: `nn.MultiheadAttention` reads
`out_proj.weight`. In that case, the hooks that gather a unit before the forward of its module do
not run.
- `intercept_reads` calls `FSDP._full_if_running` for every read of a parameter as an attribute. If
  the parameter is sharded at that time, its unit is gathered immediately, is kept unsharded until
  forward ends, and is recorded in `uncalled`.
- The module that reads the parameter is unknown. At the end of that forward, `assign_readers`
  assigns the unit to the module of the parameter, and the unit is gathered with that module from
  then on. If a later forward still reads the parameter while it is sharded, the unit is assigned to
  the next enclosing module, up to the root.
- The time at which autograd needs such a parameter is unknown too. A unit in `uncalled` is
  gathered when backward starts and is kept until backward ends. A unit with a reader
  (`units_read_by`) is kept from the start of the reader's backward until its end.
"""

from __future__ import annotations

from torch import nn

from zero.fsdp.unit import Unit


class ExternalReads:
    """The units that were read while sharded, and the modules that are assumed to read them."""

    def __init__(self) -> None:
        #: The units that were read while sharded since the latest step.
        self.uncalled: list[Unit] = []
        #: The units that are gathered with each reader.
        self.units_read_by: dict[nn.Module, set[Unit]] = {}
        #: The path of each unit's reader.
        self._reader_paths: dict[Unit, str] = {}

    def record(self, unit: Unit) -> None:
        """Record that a unit was read while it was sharded, and keep it unsharded."""
        unit.keep_unsharded = True
        if unit not in self.uncalled:
            self.uncalled.append(unit)

    def assign_readers(
        self, root: nn.Module, units_of: dict[nn.Module, list[Unit]]
    ) -> list[nn.Module]:
        """Assign each recorded unit to the next enclosing module, in `units_of`.

        Return the modules that had no units before.
        """
        added = []
        for unit in self.uncalled:
            path = self._reader_paths.get(unit)
            if path == "":
                # The root is the outermost module.
                continue
            path = (path or unit.parameters[0].name).rpartition(".")[0]
            self._reader_paths[unit] = path
            reader = root.get_submodule(path)
            if reader not in units_of:
                units_of[reader] = []
                added.append(reader)
            if unit not in units_of[reader]:
                units_of[reader].append(unit)
            unit.is_read_in_backward = True
            self.units_read_by.setdefault(reader, set()).add(unit)
        return added

    def keep_for_backward(self, module: nn.Module) -> None:
        """Keep the units that a module reads unsharded during its backward."""
        for unit in self.units_read_by.get(module, ()):
            unit.keep_unsharded = True

    def release_after_backward(self, module: nn.Module) -> None:
        """Allow the units that a module reads to be freed, if their last use is known."""
        for unit in self.units_read_by.get(module, ()):
            if unit not in self.uncalled:
                unit.keep_unsharded = False
