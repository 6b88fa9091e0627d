"""Tiny tensors gain nothing from a second thread, and a busy machine makes threads wait for each other."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
