"""Which layers of its two stacks a stage of a T5 holds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EncoderDecoderLayers:
    """Layers of an encoder followed by a decoder, as two lists, each numbered from 0.

    ``closes_encoder``, ``opens_decoder``: whether the encoder's last and the decoder's first layer are among them.
    """

    encoder: range
    decoder: range
    closes_encoder: bool
    opens_decoder: bool

    @classmethod
    def of(cls, layers: range, encoder_layers: int) -> EncoderDecoderLayers:
        """Consecutive ``layers`` of the chain, of which those before ``encoder_layers`` are the encoder's."""
        start, stop = layers.start, layers.stop
        return cls(
            encoder=range(min(start, encoder_layers), min(stop, encoder_layers)),
            decoder=range(max(start - encoder_layers, 0), max(stop - encoder_layers, 0)),
            closes_encoder=start < encoder_layers <= stop,
            opens_decoder=start <= encoder_layers < stop,
        )
