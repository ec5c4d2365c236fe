"""All-reduce of PyTorch's gloo between local processes: the peer of examples/all_reduce.rs.

    peer_gloo.py RANKS MIB ROUNDS

Prints the seconds of each round that rank 0 measured, one a line.
"""

import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WARM_UP = 3


def measure(rank, ranks, mib, rounds, port):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    bucket = torch.ones(mib << 18)
    for turn in range(WARM_UP + rounds):
        bucket.fill_(1.0)
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(bucket)
        if rank == 0 and turn >= WARM_UP:
            print(time.perf_counter() - start, flush=True)
        assert bool((bucket == ranks).all())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    import socket

    ranks, mib, rounds = map(int, sys.argv[1:4])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(measure, (ranks, mib, rounds, port), nprocs=ranks)
