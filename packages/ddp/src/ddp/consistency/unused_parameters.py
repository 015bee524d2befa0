"""Parameters that no rank used. As with torch's DDP, they are an error in the next forward pass."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn

from ddp.options import Options
from ddp.reducer import Reducer


class UnusedParameters:
    """The parameters without a gradient on any rank in the last step."""

    def __init__(self) -> None:
        #: The parameters that no rank used, by name. Empty if the options allow such parameters.
        self.parameters: dict[str, nn.Parameter] = {}

    def record(self, reducer: Reducer, unused: Collection[int], options: Options) -> None:
        """Record the parameters with the indices `unused`, which no rank used in the last step."""
        self.parameters = {}
        if options.find_unused_parameters or options.static_graph:
            return
        for index in sorted(unused):
            # Frozen parameters are not expected to have a gradient.
            if reducer.parameters[index].requires_grad:
                self.parameters[reducer.names[index]] = reducer.parameters[index]

    def check_unused(self, trained: Sequence[str], rank: int) -> None:
        """Raise `RuntimeError`, with the message of torch's DDP, if the last step had any."""
        # The caller may have frozen parameters since the last step.
        names = [name for name, parameter in self.parameters.items() if parameter.requires_grad]
        if not names:
            return
        cause = f"did not receive grad for rank {rank}: "
        indices = [str(trained.index(name)) for name in names]
        raise RuntimeError(
            "Expected to have finished reduction in the prior iteration before starting a new one: "
            "its loss did not depend on every parameter, on any rank. Make sure that all "
            "`forward` function outputs participate in calculating loss; freeze parameters that "
            "are not trained; or allow unused parameters by passing the keyword argument "
            "`find_unused_parameters=True`. (To see names, it is not "
            "necessary to set the environment variable TORCH_DISTRIBUTED_DEBUG to either INFO or "
            "DETAIL.) "
            f"Parameters which {cause}{', '.join(names)}. Parameter indices which "
            f"{cause}{' '.join(indices)}"
        )
