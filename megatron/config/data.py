"""What the model reads."""

from __future__ import annotations

from typing import Literal

from typing_extensions import override

from megatron.config.flags import Settings, derive, flag, flags_of, switch

DEFAULT_SPLIT = "969, 30, 1"


class DataConfig(Settings):
    """Data sets, how they are split, ordered and loaded."""

    seq_length: int = flag("Tokens of one sample.", at_least=1, from_checkpoint=True)
    data_path: tuple[str, ...] = flag(
        "Prefix of PREFIX.bin and PREFIX.idx (a path, or a URL such as s3://...), or several: PREFIX PREFIX ..., "
        "or WEIGHT PREFIX WEIGHT PREFIX ...",
        default=(),
    )
    split: str = flag("Shares of --data-path for training, validation and test.", derived=DEFAULT_SPLIT)
    train_data_path: tuple[str, ...] = flag("As --data-path, for training only.", default=())
    valid_data_path: tuple[str, ...] = flag("As --data-path, for validation only.", default=())
    test_data_path: tuple[str, ...] = flag("As --data-path, for test only.", default=())
    data_args_path: str | None = flag("Text file with the values of --data-path.", default=None)
    per_split_data_args_path: str | None = flag(
        'JSON file {"train": [...], "valid": [...], "test": [...]} with the data paths of each split.',
        default=None,
    )
    multiple_validation_sets: bool = switch(
        "Evaluate each validation data set separately, under its name: PREFIX PREFIX ... or NAME=PREFIX ..."
    )
    full_validation: bool = switch("Each evaluation reads the validation data once, instead of --eval-iters batches.")
    mock_data: bool = switch("Synthetic data, no files.")
    data_cache_path: str | None = flag(
        "Folder for index caches and for data fetched from URLs; unless given, caches are stored beside the data.",
        default=None,
    )
    data_order: Literal["epoch", "megatron"] = flag(
        "epoch: sample i depends on seed and data alone; megatron: exactly Megatron-LM's order.", default="epoch"
    )
    dataloader_type: Literal["single", "cyclic"] = flag(
        "single: in the data set's order; cyclic: shuffled anew each epoch.",
        default="single",
        refused_values={"external": "data loaders are not plugged in by flag; leave it out"},
    )
    num_workers: int = flag(
        "Data loading processes per rank; 0: load in the training process.", default=2, at_least=0, at_most=1024
    )
    mmap_bin_files: bool = switch(
        "Read .bin files with ordinary reads instead of mapping them.", off="--no-mmap-bin-files"
    )
    verify_data: bool = switch(
        "At the start, read all bytes of the data and compare them with their digests in PREFIX.meta.json and with "
        "those of other ranks (about a second a GB, on each rank)."
    )
    reset_position_ids: bool = switch("Restart positions after each end of document.")
    reset_attention_mask: bool = switch("Attend only within a document.")
    eod_mask_loss: bool = switch("No loss where the input token is the end of a document.")

    packing: Literal["stream", "padding-free", "best-fit"] = flag(
        "stream: concatenate documents and cut them at the ends of samples; padding-free: the same, with separate "
        "attention, positions and loss for each document; best-fit: as padding-free, but keep documents whole "
        "where they fit, and pad samples.",
        default="stream",
    )
    sft: bool = switch("Loss on the targets only, in data made by tools/preprocess_sft.py.")
    fim_rate: float = flag(
        "Share of training documents rearranged so that the model learns to fill in the middle.",
        default=0.0,
        at_least=0,
        at_most=1,
    )
    fim_spm_rate: float = flag(
        "Share of rearranged documents in which the suffix comes before the prefix.", default=0.5, at_least=0, at_most=1
    )
    fim_prefix_token: str = flag("Token before the prefix, with --fim-rate.", default="<fim_prefix>")
    fim_middle_token: str = flag("Token before the middle, with --fim-rate.", default="<fim_middle>")
    fim_suffix_token: str = flag("Token before the suffix, with --fim-rate.", default="<fim_suffix>")

    @override
    def __post_init__(self) -> None:
        derive(self, "split", DEFAULT_SPLIT)
        if self.packing != "stream":
            for field in ("reset_position_ids", "reset_attention_mask"):
                object.__setattr__(self, field, True)

    @property
    def may_pad(self) -> bool:
        """Whether positions after the text of a sample may be padding; other samples are full."""
        return self.packing == "best-fit" or self.data_order == "megatron" or self.fim_rate > 0 or self.full_validation

    def given_document_flags(self) -> list[str]:
        """The given flags that decide how a stream of documents is cut into samples."""
        given = {
            "--packing": self.packing != "stream",
            "--reset-position-ids": self.reset_position_ids and self.packing == "stream",
            "--reset-attention-mask": self.reset_attention_mask and self.packing == "stream",
            "--eod-mask-loss": self.eod_mask_loss,
            "--sft": self.sft,
            "--fim-rate": self.fim_rate > 0,
        }
        specs = (spec for spec in flags_of(DataConfig) if spec.field.startswith("fim_") and spec.field != "fim_rate")
        fill_in = [spec.positive for spec in specs if getattr(self, spec.field) != spec.default]
        return [*(flag for flag, value in given.items() if value), *fill_in]
