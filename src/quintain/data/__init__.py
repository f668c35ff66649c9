"""Dataset references, prompts, and the resumable order in which they are drawn."""

from quintain.data.builtin import BUILTIN
from quintain.data.prompts import PromptFormat
from quintain.data.references import load_dataset_reference
from quintain.data.sampler import PromptSampler

__all__ = ["BUILTIN", "PromptFormat", "PromptSampler", "load_dataset_reference"]
