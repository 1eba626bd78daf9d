"""Installs the package ``megatron`` as the distribution ``pretrain-megatron``: plain Python, nothing to compile."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "megatron" / "version.py").read_text(encoding="utf-8"))
assert VERSION is not None, "megatron/version.py holds the version"

PARQUET = ["pyarrow"]  # .parquet input of tools/preprocess_data.py
GIGATOKEN = ["gigatoken>=0.10,<0.11"]  # the fast engine of tools/preprocess_data.py
# It has wheels for these platforms, and no Rust compiler is needed; elsewhere the tokenizers library does the same.
HAS_GIGATOKEN = (
    "implementation_name == 'cpython'"
    " and (sys_platform == 'linux' or sys_platform == 'darwin' or sys_platform == 'win32')"
    " and (platform_machine == 'x86_64' or platform_machine == 'AMD64'"
    " or platform_machine == 'aarch64' or platform_machine == 'arm64')"
)
STORAGE = ["fsspec"]  # --save, --load and data at URLs; each kind of storage needs a library of its own, too
S3 = [*STORAGE, "s3fs"]  # s3:// URLs
CHAT = ["jinja2"]  # --chat-template of tools/preprocess_sft.py
TIKTOKEN = ["tiktoken"]  # --tokenizer-type TikTokenizer
# Conversion from and to its format, the proof and parity tests; models named as repositories of its Hub.
HUGGINGFACE = ["transformers", "safetensors", "huggingface_hub"]
SERVE = ["starlette>=1", "uvicorn>=0.30", "prometheus_client", *CHAT]  # tools/run_text_generation_server.py
LM_EVAL = ["lm_eval[api]>=0.4.13"]  # tasks/lm_eval.py, and the harness's clients of servers
ACCELERATE = ["accelerate>=1.2"]  # examples/accelerate: a model of ours in its loop
GGUF = ["gguf>=0.17"]  # --to gguf and --from gguf of tools/checkpoint/convert.py: llama.cpp's format
# --to onnx: torch's exporter needs the first two, the proof the third.
ONNX = ["onnx>=1.18", "onnxscript>=0.5", "onnxruntime>=1.22"]
# Formats of quantized models that transformers reads with it: the proof of --quantize.
COMPRESSED_TENSORS = ["compressed-tensors>=0.17"]
PEFT = ["peft>=0.17"]  # the proof of adapters' folders
IMAGES = ["pillow>=10.1"]  # images of pretrain_vlm.py and tools/preprocess_images.py
PLOT = ["matplotlib"]  # the picture of a loss curve, the report of a run
METRICS = ["prometheus_client"]  # --metrics-port
OPENTELEMETRY = ["opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"]  # --otlp-endpoint
MLFLOW = ["mlflow-skinny>=3"]  # --mlflow-experiment
RAY = ["ray>=2.40"]  # --ray of tools/preprocess_data.py; no test environment has it, as it takes 250 MB
GCS = [*STORAGE, "gcsfs"]  # gs:// URLs
TEST = ["pytest>=9", "pytest-xdist", "hypothesis"]
STORAGE_SERVERS = ["moto[s3]", "flask", "flask-cors", "gcp-storage-emulator"]  # S3's and Google's protocols, for tests
CONSTRAINED = ["llguidance>=1.9,<2"]  # answers that follow a JSON schema or a grammar; wheels for all platforms
CLIENTS = ["openai", "schemathesis"]  # of the server, for its tests
# llama.cpp itself, which answers the files that tests export; wheels for Linux, macOS and Windows.
READERS = ["xllamacpp"]
DIGITS = ["scikit-learn"]  # scanned digits of examples/vision_language
CHECK = ["ruff", "mypy", "import-linter", "types-PyYAML", "pre-commit"]
DOCS = ["zensical>=0.0.73", "mkdocstrings[python]>=1"]  # docs/site.py
# Enough to change and check the model, data, training, conversion and the server.
DEV = [*PARQUET, *GIGATOKEN, *TIKTOKEN, *HUGGINGFACE, *STORAGE, *SERVE, *CONSTRAINED, *IMAGES, *PLOT, *TEST, *CHECK]


class BuildWithPrograms(build_py):  # type: ignore[misc]  # setuptools has no types
    """A wheel also holds the programs, in megatron/programs, where the command ``megatron`` finds them."""

    def run(self) -> None:
        """Build the package, then copy the programs; an editable install uses those of the checkout."""
        super().run()
        if self.editable_mode:
            return
        programs = Path(self.build_lib) / "megatron" / "programs"
        shutil.rmtree(programs, ignore_errors=True)
        for file in (*ROOT.glob("pretrain_*.py"), *ROOT.glob("tools/**/*.py"), *ROOT.glob("tasks/**/*.py")):
            copy = programs / file.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)


setup(
    name="pretrain-megatron",  # "megatron" on PyPI is somebody else's, "megatron-core" is NVIDIA's
    version=VERSION.group(1),
    description="Pretrain language models with Megatron-LM's command line, on one core or many GPU nodes",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    # An editable install then puts this folder on the path, where megatron comes before a megatron without __init__.py,
    # as megatron-core's, in site-packages.
    package_dir={"": "."},
    packages=find_packages(include=["megatron", "megatron.*"]),
    package_data={"megatron": ["py.typed", "serving/page/*.html", "core/tokenizers/published/*.json"]},
    cmdclass={"build_py": BuildWithPrograms},
    entry_points={"console_scripts": ["megatron = megatron.__main__:main"]},
    install_requires=[
        "torch>=2.9,<3",
        "numpy",
        "tokenizers>=0.20",
        "sentencepiece",
        "nltk>=3.9",  # PunktTokenizer
        "tensorboard",
        "pyyaml",
        "typing_extensions>=4.4",  # override, as Python has from 3.12
        "tqdm",
        *(f"{each}; {HAS_GIGATOKEN}" for each in GIGATOKEN),
        "zstandard",
    ],
    extras_require={
        "parquet": PARQUET,
        "gigatoken": GIGATOKEN,
        "tiktoken": TIKTOKEN,
        "huggingface": HUGGINGFACE,
        "lm-eval": LM_EVAL,
        "storage": STORAGE,
        "s3": S3,
        "gcs": GCS,
        "ray": RAY,
        "chat": CHAT,
        "serve": SERVE,
        "constrained": CONSTRAINED,
        "accelerate": ACCELERATE,
        "gguf": GGUF,
        "onnx": ONNX,
        "compressed-tensors": COMPRESSED_TENSORS,
        "peft": PEFT,
        "images": IMAGES,
        "plot": PLOT,
        "metrics": METRICS,
        "opentelemetry": OPENTELEMETRY,
        "mlflow": MLFLOW,
        "docs": DOCS,
        "dev": DEV,
        # Every test but those of lm-eval and docs.
        "dev-all": [
            *(DEV + S3 + GCS + STORAGE_SERVERS + CLIENTS + ACCELERATE + OPENTELEMETRY),
            *(GGUF + ONNX + COMPRESSED_TENSORS + PEFT + READERS + DIGITS),
        ],
    },
)
