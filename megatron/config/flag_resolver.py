"""Settings from all sources: the command line, files, the command's own defaults and a checkpoint; with precedence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron.config.checkpoint import keeps_meaning
from megatron.config.command import CommandConfig
from megatron.config.computed_flags import NeededFlagError, Told
from megatron.config.deepspeed import DEEPSPEED_CONFIG, deepspeed_settings
from megatron.config.files import read_settings, words_of
from megatron.config.flags import FlagSpec, abridged, flags_of, group_name, words
from megatron.config.layer_patterns import canonical
from megatron.config.legacy_flags import LEGACY_WORDS, LegacyFlag, legacy_flag
from megatron.config.names_elsewhere import ADVICE, SAME
from megatron.config.parallel import MODEL_PARALLEL_FIELDS
from megatron.config.positions import ORIGINAL_LENGTH
from megatron.config.run import CORE_GROUPS, CheckpointReader, FlagOwner, PublishedReader, nobody
from megatron.config.saved_model import replaced_positions, with_one_tokenizer
from megatron.config.suggestions import did_you_mean, meant_by, parts_of
from megatron.errors import ConfigError

FLAG, FILE, CHECKPOINT, COMMAND = 3, 2, 1, 0


@dataclass(frozen=True)
class Given:
    """A field's value, where it came from, and the rank of that source; the highest rank wins.

    ``short_form``: the flag without a value that stood for it.
    """

    value: Any
    source: str
    rank: int
    short_form: str | None = None


class FlagResolver:
    """Settings by field while sources are read, with problems and remarks."""

    replicas = 1  # ranks with the same weights

    def __init__(
        self, groups: Sequence[type], legacy: Mapping[str, LegacyFlag] | None = None, *, owner_of: FlagOwner = nobody
    ) -> None:
        self.groups = tuple(groups)
        self._owner_of = owner_of
        self.is_run = set(CORE_GROUPS) <= set(groups)  # a tool has no flags of Megatron-LM's training
        self._legacy = legacy_flag if self.is_run else (legacy or {}).get
        self._added = {group_name(group) for group in groups if getattr(group, "is_added", False)}  # to trained models
        self.given: dict[str, Given] = {}
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.faulted: set[str] = set()
        self.renamed: dict[str, str] = {}  # by spelling: the note about it
        self._said: dict[tuple[str, str], tuple[int, list[str]]] = {}  # by reason: the sentence's place, and its flags
        self._by_field: dict[str, FlagSpec] = {}
        self._by_spelling: dict[str, tuple[FlagSpec, bool | str | None]] = {}
        self._yielding: list[tuple[FlagSpec, Given]] = []
        self._underscored: list[str] = []
        self._deepspeed: list[tuple[str, str]] = []
        self._computed: dict[str, tuple[LegacyFlag, list[Any], int]] = {}
        assert len({group_name(group) for group in groups}) == len(groups), f"two of {groups} have one name in files"
        for spec in (spec for group in groups for spec in flags_of(group)):
            for spelling, value in spec.spellings().items():
                assert spelling not in self._by_spelling, f"two fields claim {spelling}"
                self._by_spelling[spelling] = (spec, value)
                self._by_field[spec.field] = spec

    def value(self, field: str) -> Any:
        """The value of a field so far, or its default."""
        return self.given[field].value if field in self.given else self._by_field[field].default

    def source(self, spec: FlagSpec, value: Any) -> str:
        """Where the final ``value`` of a field came from."""
        if spec.field in self.given:
            return self.given[spec.field].source
        return "default" if value == spec.default else "derived"

    @property
    def inherited(self) -> frozenset[str]:
        """Fields whose value is that of a checkpoint or a published model."""
        return frozenset(field for field, given in self.given.items() if given.rank == CHECKPOINT)

    def read_command_line(self, argv: Sequence[str]) -> None:
        """Take flags, each followed by its values, and the files that ``--config`` names among them."""
        given = [*words_of(argv)]
        at = 0
        while at < len(given):
            flag, at = given[at], at + 1
            spelling, equals, attached = flag.text.partition("=")
            values = [attached] if equals else []
            if not flag.is_flag:
                self._wrong(f"{flag.text!r} does not belong to a flag: values follow a flag that starts with --")
                continue
            while at < len(given) and not given[at].is_flag:
                values.append(given[at].text)
                at += 1
            rank = FLAG if flag.source == "flag" else FILE
            self._take_spelling(spelling, values, source=flag.source, rank=rank)
        for path in self.value("config") if "config" in self._by_field else ():
            self._read_file(path)
        self._check_bounds()
        self._take_implied()
        for spelling, (legacy, values, rank) in self._computed.items():
            self._compute(spelling, legacy, values, rank=rank)
        if self.is_run:
            self._take_latent_positions()

    def _read_file(self, path: str) -> None:
        """Take a settings file, flat or nested by group."""
        try:
            settings = read_settings(path)
        except ConfigError as error:
            self._wrong_file(str(error))
            return
        names = {group_name(group) for group in self.groups if group is not CommandConfig}
        for key, value in settings.items():
            if key in names and isinstance(value, Mapping):
                for field, inner in value.items():
                    self._take_key(str(field), inner, source=path, group=key)
            else:
                self._take_key(key, value, source=path)

    def _take_implied(self) -> None:
        """Take the values that follow from others, where they are not given."""
        for spec in self._by_field.values():
            given = self.given.get(spec.field)
            if given is None:
                continue
            for field, value in spec.options.implies(given.value).items():
                implied = Given(value, f"from {spec.positive}", given.rank)
                if field not in self.given or self.given[field].rank < implied.rank:
                    self._offer(self._by_field[field], implied)
        self._check_bounds()

    def _take_latent_positions(self) -> None:
        """Take rotary positions of latent attention as Megatron-LM does: they are YaRN's wherever there is a factor.

        Flags, files and a checkpoint give another original length than Megatron-LM's.
        """
        given, factor = self.given.get("position_embedding_type"), self.value("rotary_scaling_factor")
        if given is None or given.value != "rope" or factor == 1 or self.value("rope_type") == "rope":
            return
        if not self.value("multi_latent_attention"):
            return
        self.given["position_embedding_type"] = replace(given, value="yarn")
        length = Given(ORIGINAL_LENGTH, "Megatron-LM's default", COMMAND)
        self._offer(self._by_field["original_max_position_embeddings"], length)
        self.notes.append(
            f"--position-embedding-type rope with --multi-latent-attention and --rotary-scaling-factor {factor:g}: "
            "taken as yarn with --original-max-position-embeddings "
            f"{self.value('original_max_position_embeddings')}, as Megatron-LM does"
        )

    def read_defaults(self, defaults: Mapping[str, Any], prog: str) -> None:
        """Take the command's own defaults, which replace those of its flags."""
        for field, value in defaults.items():
            self._offer(self._by_field[field], Given(value, f"default of {prog}", COMMAND))

    def read_checkpoint(self, reader: CheckpointReader | None, published: PublishedReader | None) -> None:
        """Take the architecture from the settings saved in the checkpoint that ``--load`` names, or, while there is
        none, from the Hugging Face model of ``--load-hf``.
        """
        hf, asked = self.value("load_hf"), self.value("use_checkpoint_args")
        if hf is None and not asked:
            return
        load, pretrained = self.value("load"), self.value("pretrained_checkpoint")
        path, saved = load or pretrained, None
        if path is not None:
            assert reader is not None, "a command with --use-checkpoint-args passes checkpoint_config"
            saved = reader(path, self.value("ckpt_step") if load else None)
            if saved is None and load and pretrained:  # a run that has saved nothing yet
                path, saved = pretrained, reader(pretrained, None)
        if saved is not None:
            self._take_architecture(saved, f"checkpoint {path}")
        elif hf is not None:
            assert published is not None, "a command with --load-hf passes published_config"
            settings = published(hf, self.groups, self.value("load_peft"))
            self._take_architecture(settings, f"{hf}/config.json", is_published=True)
        elif path is None:
            taker = "this command" if self.given["use_checkpoint_args"].rank == COMMAND else "--use-checkpoint-args"
            sentence = f"{taker} takes the architecture from a checkpoint: name its folder with --load"
            self._wrong(sentence, self._checkpoint_fields())
        else:
            sentence = f"there is no checkpoint in {path} to take the architecture from: give another --load or the "
            self._wrong(f"{sentence}sizes as flags", self._checkpoint_fields())

    def _take_architecture(self, saved: Mapping[str, Any], source: str, *, is_published: bool = False) -> None:
        """Take what neither flags nor files give. ``is_published``: they must not contradict the architecture."""
        given = {field: each.value for field, each in self.given.items() if each.rank > CHECKPOINT}
        lost = replaced_positions(saved, given, scales=bool(self.value("use_rope_scaling")))
        saved, wrong = with_one_tokenizer(saved, given), list[str]()
        layers = saved.get("model", {}).get("num_layers")
        for spec in self._checkpoint_fields():
            value, known = saved.get(spec.group, {}).get(spec.field), self.given.get(spec.field)
            value = spec.restore(value, where=source)
            is_given = known is not None and known.rank > CHECKPOINT and spec.options.architecture
            asked = known.value if known is not None and is_given else value
            asked = canonical(spec.field, asked, layers) if is_published else asked
            may_differ = spec.group in self._added or keeps_meaning(spec.field, value, asked)
            if is_published and asked != value and not may_differ:
                wrong.append(f"{spec.typed(asked)} ({'not set' if value is None else words(value)} there)")
            elif value is not None and spec.field not in lost:
                self._offer(spec, Given(value, source, CHECKPOINT))
        if wrong:
            self._wrong(f"{', '.join(wrong)}: the architecture comes from {source} of --load-hf; leave the flags out")

    def _checkpoint_fields(self) -> Iterator[FlagSpec]:
        for spec in self._by_field.values():
            if spec.field == "tokenizer_model" and not self.value("use_tokenizer_model_from_checkpoint_args"):
                continue
            taken = spec.options.architecture or spec.options.from_checkpoint
            if taken or (spec.field in MODEL_PARALLEL_FIELDS and self.value("use_mp_args_from_checkpoint_args")):
                yield spec

    def finish(self) -> None:
        """Apply flags that yield to others, and report required ones that are missing."""
        if self._underscored:
            self.notes.append(f"{', '.join(dict.fromkeys(self._underscored))}: read with dashes instead of underscores")
        for flag, path in self._deepspeed:
            self._take_deepspeed(flag, path)
        for spec, given in self._yielding:
            if spec.field not in self.given or self.given[spec.field].rank < given.rank:
                self.notes.append(f"{given.source}: taken as {spec.typed(given.value)}")
                self._offer(spec, given)
        self._check_bounds()
        required = [spec for spec in self._by_field.values() if spec.required and spec.field not in self.given]
        missing = [spec for spec in required if spec.positive not in self.faulted]
        if missing:
            named = (f"{spec.positive} ({_within_a_sentence(spec.options.help)})" for spec in missing)
            self._wrong(f"missing: {', '.join(named)}", missing)

    def _check_bounds(self) -> None:
        """Take out numbers beyond their bounds, before anything is computed from them."""
        for spec in self._by_field.values():
            given = self.given.get(spec.field)
            if given is not None and (sentence := spec.out_of_bounds(given.value)):
                self._wrong(sentence if given.rank == FLAG else f"{given.source}: {sentence}", [spec])
                del self.given[spec.field]

    def build(self, group: type) -> Any:
        """The group with its values; a missing required field gets a stand-in, so that other rules can still run."""
        specs = [spec for spec in flags_of(group) if not spec.options.internal]
        missing = {spec.field: spec.placeholder() for spec in specs if spec.required}
        given = {spec.field: self.given[spec.field].value for spec in specs if spec.field in self.given}
        return group(**{**missing, **given})

    def _take_key(self, key: str, value: Any, *, source: str, group: str | None = None) -> None:
        """Take an entry of a settings file, by field name or by flag name without dashes."""
        if value is None:
            return
        spec = self._by_field.get(key.replace("-", "_"))
        if spec is None:
            spelling = "--" + key.replace("_", "-")
            short, _ = self._by_spelling.get(spelling, (None, None))
            if short is not None and group not in (None, short.group):
                self._wrong(f"{source}: {key} belongs under {short.group}, not under {group}")
                return
            if self._is_known(spelling):
                values = [] if value is True else value if isinstance(value, list) else [value]
                self._take_spelling(spelling, values, source=source, rank=FILE)
                return
            hint = did_you_mean(key.replace("-", "_"), self._by_field, words=LEGACY_WORDS)
            self._wrong(f"{source}: there is no setting {key}{hint or self._meant_by(spelling)[1]}")
        elif spec.group == group_name(CommandConfig):
            self._wrong(f"{source}: {key} is given on the command line only")
        elif group is not None and spec.group != group:
            self._wrong(f"{source}: {key} belongs under {spec.group}, not under {group}")
        else:
            self._take(spec, value, source=source, rank=FILE)

    def _take_spelling(self, spelling: str, values: list[Any], *, source: str, rank: int) -> None:
        """Take a flag of this program or of Megatron-LM."""
        with_dashes = spelling.replace("_", "-")
        if not self._is_known(spelling) and self._is_known(with_dashes):
            self._underscored.append(spelling)
            spelling = with_dashes
        if spelling in self._by_spelling:
            spec, switch = self._by_spelling[spelling]
            if isinstance(switch, str):
                self._take_short_form(spec, Given(switch, source, rank, spelling), values)
            elif switch is not None and values == [False]:
                self._take(spec, not switch, source=source, rank=rank)
            else:
                self._take(spec, values if switch is None or values else switch, source=source, rank=rank)
            return
        if self.is_run and (spelling in DEEPSPEED_CONFIG or (spelling == "--deepspeed" and values)):
            self._deepspeed.append((spelling, str(values[0]) if values else ""))
            return
        where, owner = "" if source == "flag" else f"{source}: ", self._owner_of(spelling)
        legacy = self._legacy(spelling)
        is_taken = legacy is not None and legacy.verdict == "renamed"
        if owner is not None and not is_taken:
            self._wrong(f"{where}{spelling} belongs to {owner}; leave it out, or train such a model")
        elif legacy is not None:
            self._take_legacy(spelling, legacy, values, source=source, rank=rank)
        else:
            meant, hint = self._meant_by(spelling)
            lacking = [self._by_spelling[meant][0]] if meant else []
            lacking = [spec for spec in lacking if spec.field not in self.given]
            self._wrong(f"{where}there is no flag {spelling}{hint}", lacking)

    def _meant_by(self, spelling: str) -> tuple[str | None, str]:
        """The flag that an unknown one stands for, if there is one, and the hint for its message."""
        last = (
            f"--{spelling.rpartition('.')[2].replace('_', '-')}" if "." in spelling else spelling
        )  # torchtitan's groups
        parts = parts_of(last)
        meant = SAME.get(parts) or (last if last in self._by_spelling else None)
        meant = meant or meant_by(spelling, self._by_spelling, words=LEGACY_WORDS)
        if meant in self._by_spelling:
            return meant, f" (did you mean {meant}?)"
        advice = ADVICE.get(parts) if self.is_run else None
        return None, f": {advice}" if advice else ""

    def _take_short_form(self, spec: FlagSpec, given: Given, values: list[Any]) -> None:
        """A flag without a value that stands for a choice of another flag; in a file it may be off."""
        if not values:
            self._offer(spec, given)
        elif values != [False]:
            where = "" if given.rank == FLAG else f"{given.source}: "
            self._wrong(
                f"{where}{given.short_form} is on or off and takes no value, so {words(values)!r} cannot follow it",
                [spec],
            )

    def _is_known(self, spelling: str) -> bool:
        if spelling in self._by_spelling or self._legacy(spelling) is not None:
            return True
        return self.is_run and (spelling in DEEPSPEED_CONFIG or self._owner_of(spelling) is not None)

    def _take_legacy(self, spelling: str, legacy: LegacyFlag, values: list[Any], *, source: str, rank: int) -> None:
        typed = words([spelling, *values])
        if values and all(str(value) in legacy.harmless for value in values):
            return
        legacy = legacy.values.get(words(values), legacy)
        if legacy.verdict == "refused":
            self._say(self.problems, typed, legacy.word)
        elif legacy.verdict == "ignored":
            self._say(self.notes, typed, legacy.word, one=" has no effect", more=" have no effect")
        elif legacy.verdict == "computed":
            self._computed[spelling] = (legacy, values, rank)
        else:
            self._take_as(typed, legacy, values, rank=rank)

    def _compute(self, spelling: str, legacy: LegacyFlag, values: list[Any], *, rank: int) -> None:
        """Take a flag whose meaning depends on others, which are all read."""
        typed = words([spelling, *values])
        told = Told({field: given.value for field, given in self.given.items()}, self._computed, self._by_field)
        assert legacy.computed is not None, f"{spelling} has no meaning"
        try:
            meant = legacy.computed([*map(str, values)], told)
        except ConfigError as error:
            if not isinstance(error, NeededFlagError) or error.flag not in self.faulted:
                self._wrong(f"{words([spelling, *(abridged(str(each)) for each in values)])}: {error}")
            return
        for field in (field for field, value in meant.items() if value is None):
            if field in self.given:
                self.notes.append(f"{self._by_field[field].typed(self.given.pop(field).value)}: {typed} replaces it")
        sets = {field: value for field, value in meant.items() if value is not None}
        if not meant:
            self.notes.append(f"{typed} has no effect: the other flags describe the layers")
            return
        self._take_as(typed, replace(legacy, verdict="renamed", sets=sets), values, rank=rank)

    def _take_as(self, typed: str, legacy: LegacyFlag, values: list[Any], *, rank: int) -> None:
        """Take a flag under another name: set the fields that it means, and remark on it."""
        spelling = typed.partition(" ")[0]
        meant = [
            (self._by_field[name], values or True if value is None else value) for name, value in legacy.sets.items()
        ]
        text = f"taken as {' '.join(spec.typed(value) for spec, value in meant)}"
        if not legacy.yields:
            self.renamed[spelling] = f"{typed}: {text}{_reason(legacy.word)}"
            self.notes.append(self.renamed[spelling])
        for spec, raw in meant:
            try:
                given = Given(spec.convert(raw), spelling, rank, spelling if spec.options.short_forms else None)
                wrong = spec.out_of_bounds(given.value)
            except ConfigError as error:
                wrong = str(error)
            if wrong:
                self._wrong(f"{typed} is {text}, and {wrong}", [spec])
            elif legacy.yields:
                self._yielding.append((spec, given))
            else:
                self._offer(spec, given)

    def _take_deepspeed(self, flag: str, path: str) -> None:
        """Take the settings of DeepSpeed's configuration file that no flag gives; a contradiction is a problem."""
        try:
            settings = deepspeed_settings(read_settings(path, flag=flag), where=f"{flag} {path}", ranks=self.replicas)
        except ConfigError as error:
            self._wrong_file(str(error))
            return
        for sentence in settings.refused:
            self._wrong(f"{path}: {sentence}")
        taken = []
        for key, name, raw in settings.asked:
            spec, known = self._by_field[name], self.given.get(name)
            try:
                value = None if raw is None else spec.convert(raw)
            except ConfigError as error:
                self._wrong(f"{path}: {key}: {error}")
                continue
            if known is None and value is not None:
                self._offer(spec, Given(value, path, FILE))
                taken.append(spec.typed(value))
            elif known is not None and value is None:  # DeepSpeed scales the loss, and reads its file alone
                self.notes.append(
                    f"{spec.typed(known.value)} has no effect: {path} has {key} {raw or 0}, dynamic scaling"
                )
                del self.given[name]
            elif known is not None and known.value != value:
                self._wrong(f"{path} has {key} {raw or 0}, but {spec.typed(known.value)} is given; make them agree")
        if taken:
            self.notes.append(f"{flag} {path}: taken as {' '.join(taken)}")
        if settings.without_effect:
            self.notes.append(f"{flag} {path}: {', '.join(settings.without_effect)} have no effect")

    def _take(self, spec: FlagSpec, raw: Any, *, source: str, rank: int) -> None:
        try:
            value = spec.convert(raw)
        except ConfigError as error:
            self._wrong(str(error) if rank == FLAG else f"{source}: {error}", [spec])
            return
        word = raw[0] if isinstance(raw, list) else raw
        if isinstance(word, str) and word in spec.options.renamed_values:
            self.notes.append(
                f"{spec.positive} {word}: taken as {value}{_reason(spec.options.renamed_values[word][1])}"
            )
        self._offer(spec, Given(value, source, rank))

    def _offer(self, spec: FlagSpec, given: Given) -> None:
        """Keep the value unless one of higher rank is known; among equal ranks the later one is used, unless one is a
        short form: two that differ contradict each other, or have a meaning together.
        """
        known = self.given.get(spec.field)
        if known is None or known.value == given.value:
            self.given[spec.field] = given if known is None or known.rank <= given.rank else known
        elif both := self._combined(spec, known, given):
            self.given[spec.field] = Given(both, given.source, max(known.rank, given.rank), given.short_form)
        elif known.rank == given.rank and (known.short_form or given.short_form):
            named = (each.short_form or spec.typed(each.value) for each in (known, given))
            self._wrong(f"{' and '.join(named)} are mutually exclusive; keep one", [spec])
        elif known.rank <= given.rank:
            if known.rank == given.rank:
                before, after = words(known.value), words(given.value)
                self.notes.append(f"{spec.positive} is given twice, {before} and {after}: the last one is used")
            self.given[spec.field] = given

    @staticmethod
    def _combined(spec: FlagSpec, known: Given, given: Given) -> Any:
        """What two short forms mean together, if anything; one of them may be repeated."""
        if not (known.short_form and given.short_form):
            return None
        for pair, both in spec.options.combined.items():
            if given.value in pair and known.value in {both, *pair}:
                return both
        return None

    def _wrong(self, sentence: str, faulted: Iterable[FlagSpec] = ()) -> None:
        """Add a problem; the values of the ``faulted`` flags are then unknown."""
        self.problems.append(sentence)
        self.faulted.update(spec.positive for spec in faulted)

    def _say(self, sentences: list[str], typed: str, reason: str, *, one: str = "", more: str = "") -> None:
        """Add a remark about a flag; flags with the same reason share one sentence."""
        at, flags = self._said.setdefault((reason, one), (len(sentences), []))
        flags.append(typed)
        sentences[at : at + 1] = [f"{', '.join(flags)}{more if flags[1:] else one}: {reason}"]

    def _wrong_file(self, sentence: str) -> None:
        """A settings file cannot be read: it may hold any setting that was not given."""
        self._wrong(sentence, (spec for field, spec in self._by_field.items() if field not in self.given))


def _within_a_sentence(help: str) -> str:
    """The sentence without its full stop, in lower case unless it starts with an abbreviation."""
    return f"{help[0] if help[1:2].isupper() else help[0].lower()}{help[1:-1]}"


def _reason(word: str) -> str:
    return f"; {word}" if word else ""
