"""The command lines that run a plan: torchtitan's and Megatron-LM's own options."""

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
        "activation_checkpoint.mode": plan.recompute,
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
    experts, chunks = model.experts, plan.pipeline * plan.virtual_stages
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    sharded = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads"
    grouped = f"--group-query-attention --num-query-groups {model.kv_heads}"
    overlap = "--overlap-grad-reduce --overlap-param-gather"
    switches = [
        (model.heads and model.kv_heads != model.heads, grouped),
        (model.heads * model.head_dim not in (0, model.d_model), f"--kv-channels {model.head_dim}"),
        (model.gated_mlp, "--swiglu"),
        (model.norm == "rmsnorm", "--normalization RMSNorm"),
        (not model.mlp_bias, "--disable-bias-linear"),
        (not model.positions, "--position-embedding-type rope"),
        (not model.tied, "--untie-embeddings-and-output-weights"),
        (experts, f"--expert-model-parallel-size {plan.expert}"),
        (plan.context > 1, f"--context-parallel-size {plan.context}"),
        (
            plan.virtual_stages > 1,
            f"--num-layers-per-virtual-pipeline-stage {-(-model.layers // chunks)}",
        ),
        (plan.sequence_parallel, "--sequence-parallel"),
        (plan.zero == 1, f"--use-distributed-optimizer {overlap}"),
        (plan.zero > 1, sharded + ("_params" if plan.zero == 3 else "")),
        (plan.recompute == "full", full),
        (plan.recompute == "selective", "--recompute-granularity selective"),
        (plan.offload == "optimizer", "--optimizer-cpu-offload"),
    ]
    if experts:
        options.append(f"--num-experts {experts.count} --moe-router-topk {experts.per_token}")
        options.append(f"--moe-ffn-hidden-size {experts.width}")
    return _line("pretrain_gpt.py", plan, options + [text for there, text in switches if there])


def _line(program: str, plan: Plan, options: list[str]) -> str:
    here = min(8, plan.devices)
    launcher = f"torchrun --nnodes {-(-plan.devices // here)} --nproc-per-node {here}"
    return f"{launcher} {program} " + " ".join(options)
