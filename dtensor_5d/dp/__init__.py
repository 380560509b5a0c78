"""The data axis: ZeRO 1, 2, 3 and HSDP through FSDP2 (`fsdp`), and the norm over any mix of meshes (`grads`)."""
