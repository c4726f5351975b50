"""What a layer computes: in plain torch, or in C++ compiled for this machine's processor.

It knows tensors, and neither models nor requests. Importing this package, or `build`, does not load torch.
"""
