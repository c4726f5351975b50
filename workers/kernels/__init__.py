"""What a layer computes between torch's calls: in plain torch, or in C++ compiled for this machine's processor.

It knows tensors, and neither models nor requests.
"""
