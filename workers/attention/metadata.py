"""What one step's attention needs to know about its rows, whatever the backend and the layer."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Chunks and decodes of one step as one ragged batch, without padding.

    Request i owns query rows query_start_loc[i] to query_start_loc[i + 1]. They are the last tokens of a
    sequence of seq_lens[i] tokens whose KV lies in the blocks of block_table[i]. Every request has at
    least one row.
    """

    query_start_loc: torch.Tensor  # [num_reqs + 1] int32
    seq_lens: torch.Tensor  # [num_reqs] int32, this step's tokens included
    block_table: torch.Tensor  # [num_reqs, max_blocks] int32; entries past a sequence's end are valid block ids
    slot_mapping: torch.Tensor  # [num_tokens] int64, block id * block_size + offset
    max_query_len: int
    max_seq_len: int
    host_query_lens: list[int]  # the same lengths on the host: grouping rows must not wait for the device
    host_seq_lens: list[int]
