"""Averaged gradients of which each rank stores some elements.

Note [Operations on a sharded gradient]
GradScaler, `clip_grad_norm_`, `clip_grad_value_` and training loops read and change `.grad`. Each
rank stores only 1/n of the average. On a plain tensor of these elements, an element-wise change
would be right, but a norm would silently be wrong and differ between ranks. Therefore:
- an element-wise operation acts on this rank's elements, which is exact;
- a norm, sum, mean, maximum or minimum over all elements is reduced over ranks: every rank must
  call it, and every rank gets the same value;
- GradScaler's check for infinities is reduced too, so that all ranks step or all skip the step;
- any other operation raises an error that names `full_tensor()` as the remedy.

Between steps, stage 3's parameters are shards too, and a loss may read them. The same rules apply
to them (`call_on_shards`). Reductions of tensors that need a gradient are computed on
`full_tensor()`, whose backward pass returns the average of the ranks' gradients.

Note [Two classes of sharded gradients]
At stages 1 and 2, parameters are whole, so `.grad` must have the parameter's shape. Nevertheless,
this rank's elements are stored in buckets. `AveragedGradient` is a wrapper subclass without memory.
It intercepts operations in `__torch_dispatch__`, because autograd itself adds later gradients to
it. At stage 3, a parameter is a shard with the same elements as its gradient, and an optimizer's
fused kernels must run directly on both. `ShardGradient` is a tensor with memory. It intercepts
Python calls, and between steps it refuses operators that are not element-wise within these calls.
"""
