"""Trains a small Llama on sequences that are cut over ranks: one long document, then rows of packed documents.

    torchrun --nproc-per-node 2 recipes/long_context.py
    torchrun --nproc-per-node 4 recipes/long_context.py --tp 2 --sequence 16384 --context ring+ulysses

Each phase prints, for every rank, the tokens it holds of a row, the pairs of tokens its attention works on in a layer
(equal numbers: nobody waits; beside them what the other order would give) and the most memory that it took so far.
Without --text the documents are the sources
of the installed Python standard library; tokens are bytes. On two CPU cores it takes about a minute.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import resource
import sys
import time
from collections.abc import Mapping

import torch
import torch.distributed as dist
from rich.console import Console
from transformers import AutoModelForCausalLM, LlamaConfig

from dtensor_5d import Degrees, PlanError, Run, build_mesh, parallelize, plan_for
from dtensor_5d.loader import END, VOCABULARY, PackedLoader, read_documents, tokenize
from dtensor_5d.order import documents_from_lengths, make_order


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--text", help="a file or a folder; default: the Python standard library")
    add("--sequence", type=int, default=8192, help="bytes in a sequence (default %(default)s)")
    add("--steps", type=int, default=3, help="of each phase")
    add("--tp", type=int, default=1)
    add("--dp-shard", type=int, default=1)
    add("--context", default="ring", choices=("ring", "allgather", "ulysses", "ring+ulysses"))
    add("--recompute", default="selective", help="none, block, selective or every=k (default %(default)s)")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    for chatty in ("torchao", "torch.utils._pytree"):
        logging.getLogger(chatty).setLevel(logging.ERROR)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=768, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=args.sequence, bos_token_id=END, eos_token_id=END,
    )  # fmt: skip
    text = tokenize(read_documents(args.text))
    # One long document: the balance within it is exact. Packed rows: each document is balanced by itself.
    for phase, balance, packed in (("one document", "zigzag", False), ("packed documents", "document", True)):
        degrees = Degrees(dp_shard=args.dp_shard, cp=-1, tp=args.tp)
        plan = plan_for(
            config, degrees, context=args.context, balance=balance, recompute=args.recompute,
            precision="bf16" if device == "cuda" else None,
        )  # fmt: skip
        mesh = build_mesh(degrees, device)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        run = parallelize(model, plan, mesh)
        run.init_weights(seed=0)
        console = Console(quiet=dist.get_rank() > 0, highlight=False)
        console.print(f"\n{phase}: {plan}" if not packed else f"\n{phase}: balance={balance}", markup=False)
        loader = PackedLoader(
            text, sequence_length=args.sequence, batch_size=run.data_size, data_rank=run.data_rank,
            data_size=run.data_size, documents=packed,
        )  # fmt: skip
        train(run, loader, args, console)
    dist.destroy_process_group()


def train(run: Run, loader: PackedLoader, args: argparse.Namespace, console: Console) -> None:
    """A few steps, and what each rank holds and does in the first of them."""
    optimizer = torch.optim.AdamW(run.parameters(), lr=1e-3)
    for step, batch in enumerate(loader.steps(args.steps), 1):
        start = time.perf_counter()
        loss = run.step(batch)
        norm = run.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds = time.perf_counter() - start
        if step == 1:
            show_ranks(run, batch, console)
        console.print(f"step {step}: loss {loss.item():.3f}  norm {norm.item():.2f}  {seconds:.2f} s")


def show_ranks(run: Run, batch: Mapping[str, torch.Tensor], console: Console) -> None:
    """Tokens, attended pairs and memory of every rank of the context axis of this rank."""
    cp = run.mesh["cp"].size()
    length = batch["input_ids"].shape[1]
    whole = -(-length // run.sequence_multiple) * run.sequence_multiple
    positions = batch.get("position_ids", torch.arange(length).view(1, -1))[0]
    starts = [*(positions == 0).nonzero().flatten().tolist(), whole]
    lengths = [stop - start for start, stop in itertools.pairwise(starts)]
    mine, other = run.plan.options.balance, "zigzag" if run.plan.options.balance == "document" else "none"
    orders = [make_order(kind, whole, cp, documents_from_lengths(lengths)) for kind in (mine, other)]
    memory: list[int] = [0] * cp
    dist.all_gather_object(memory, peak_memory(), group=run.mesh["cp"].get_group())
    console.print(f"a row of {length:,} tokens in {len(lengths)} documents, cut over {cp} ranks:")
    for rank, (pairs, others, peak) in enumerate(zip(orders[0].pairs(), orders[1].pairs(), memory)):
        work = f"{pairs:,} pairs of tokens ({other}: {others:,})"
        console.print(f"  rank {rank}: {whole // cp:,} tokens, {work}, {peak / 2**20:,.0f} MiB", soft_wrap=True)


def peak_memory() -> int:
    """Bytes: of the device, or the largest resident size of this process so far."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    try:
        main()
    except (PlanError, OSError) as error:
        sys.exit(f"long_context.py: {error}")
