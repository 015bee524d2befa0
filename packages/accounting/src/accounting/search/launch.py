"""The command lines that run a plan: torchtitan's and Megatron-LM's own options."""

from __future__ import annotations

from accounting.model.shape import Shape
from accounting.plan import Plan

_SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B"}


def torchtitan(plan: Plan, *, batch: int, seq: int) -> str:
    """Options of torchtitan's trainer; its data parallelism is DDP or FSDP2, ZeRO-1 is not in it.

    ZeRO-1 and 2 become FSDP2 that does not reshard after the forward, which shards more.
    """
    shard, replicate = (plan.data, 1) if plan.zero else (1, plan.data)
    options = {
        "training.seq_len": seq,
        "training.local_batch_size": batch // plan.data,
        "training.global_batch_size": batch,
        "parallelism.data_parallel_replicate_degree": replicate,
        "parallelism.data_parallel_shard_degree": shard,
        "parallelism.tensor_parallel_degree": plan.tensor,
        "parallelism.pipeline_parallel_degree": plan.pipeline,
        "parallelism.context_parallel_degree": plan.context,
        "parallelism.expert_parallel_degree": plan.expert,
        "activation_checkpoint.mode": {"none": "none", "selective": "selective"}.get(
            plan.recompute, "full"
        ),
    }
    if plan.zero:
        reshard = plan.zero == 3 and plan.reshard_after_forward
        options["parallelism.fsdp_reshard_after_forward"] = "always" if reshard else "never"
    if plan.pipeline > 1:
        options["parallelism.pipeline_parallel_schedule"] = _SCHEDULES[plan.schedule]
        options["parallelism.pipeline_parallel_microbatch_size"] = (
            batch // plan.data // plan.microbatches
        )
    return _line("-m torchtitan.train", plan, [f"--{k}={v}" for k, v in options.items()])


def megatron(model: Shape, plan: Plan, *, batch: int, seq: int) -> str:
    """Options of Megatron-LM's pretrain_gpt.py, the model's sizes among them."""
    options = [
        f"--num-layers {model.layers} --hidden-size {model.d_model}",
        f"--ffn-hidden-size {model.d_ff} --num-attention-heads {model.heads}",
        f"--seq-length {seq} --max-position-embeddings {max(seq, model.positions)}",
        f"--micro-batch-size {batch // plan.data // plan.microbatches}",
        f"--global-batch-size {batch} --bf16",
        f"--tensor-model-parallel-size {plan.tensor}",
        f"--pipeline-model-parallel-size {plan.pipeline}",
    ]
    if model.heads and model.kv_heads != model.heads:
        options.append(f"--group-query-attention --num-query-groups {model.kv_heads}")
    if model.heads and model.head_dim * model.heads != model.d_model:
        options.append(f"--kv-channels {model.head_dim}")
    if model.gated_mlp:
        options.append("--swiglu")
    if model.norm == "rmsnorm":
        options.append("--normalization RMSNorm")
    if not model.mlp_bias:
        options.append("--disable-bias-linear")
    if not model.positions:
        options.append("--position-embedding-type rope")
    if not model.tied:
        options.append("--untie-embeddings-and-output-weights")
    if model.experts:
        options.append(
            f"--num-experts {model.experts.count} --moe-router-topk {model.experts.per_token} "
            f"--moe-ffn-hidden-size {model.experts.width} "
            f"--expert-model-parallel-size {plan.expert}"
        )
    if plan.context > 1:
        options.append(f"--context-parallel-size {plan.context}")
    if plan.virtual_stages > 1:
        chunks = -(-model.layers // (plan.pipeline * plan.virtual_stages))
        options.append(f"--num-layers-per-virtual-pipeline-stage {chunks}")
    if plan.sequence_parallel:
        options.append("--sequence-parallel")
    sharding = {2: "optim_grads", 3: "optim_grads_params"}
    if plan.zero == 1:
        options.append("--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather")
    elif plan.zero:
        strategy = sharding[plan.zero]
        options.append(f"--use-megatron-fsdp --data-parallel-sharding-strategy {strategy}")
    if plan.recompute == "full":
        options.append("--recompute-granularity full --recompute-method uniform")
        options.append("--recompute-num-layers 1")
    elif plan.recompute == "selective":
        options.append("--recompute-granularity selective")
    if plan.offload == "optimizer":
        options.append("--optimizer-cpu-offload")
    return _line("pretrain_gpt.py", plan, options)


def _line(program: str, plan: Plan, options: list[str]) -> str:
    here = min(8, plan.devices)
    launcher = f"torchrun --nnodes {-(-plan.devices // here)} --nproc-per-node {here}"
    return f"{launcher} {program} " + " ".join(options)
