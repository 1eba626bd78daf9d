"""Adapters in PEFT's format: a folder of ``adapter_config.json`` and ``adapter_model.safetensors`` beside a base."""
