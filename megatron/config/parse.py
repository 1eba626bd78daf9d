"""From a command line to a checked run: every failure is collected, so that a user sees all of them at once."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.config.command import CommandConfig
from megatron.config.deepspeed import DEEPSPEED_CONFIG, deepspeed_settings
from megatron.config.files import Word, read_settings, words_of
from megatron.config.flags import FlagSpec, flags_of, group_name
from megatron.config.help import format_help
from megatron.config.legacy_flags import LEGACY_WORDS, LegacyFlag, legacy_flag
from megatron.config.rules import failures, listed, remarks
from megatron.config.rules.no_effect import without_effect
from megatron.config.run import CORE_GROUPS, CheckpointReader, FlagOwner, RunConfig, nobody
from megatron.config.suggestions import did_you_mean, meant_by
from megatron.config.typed_spellings import as_typed
from megatron.errors import ConfigError

FLAG, FILE, CHECKPOINT, COMMAND = 3, 2, 1, 0

# What --use-mp-args-from-checkpoint-args takes.
MODEL_PARALLEL_FIELDS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout",
    "pipeline_schedule",
)


@dataclass(frozen=True)
class Given:
    """A field's value, where it came from, and the rank of that source; the highest rank wins."""

    value: Any
    source: str
    rank: int


class Intake:
    """Settings by field while sources are read, with problems and remarks."""

    def __init__(
        self, groups: Sequence[type], legacy: Mapping[str, LegacyFlag] | None = None, *, owner_of: FlagOwner = nobody
    ) -> None:
        self.groups = tuple(groups)
        self._owner_of = owner_of
        self.is_run = set(CORE_GROUPS) <= set(groups)  # a tool has no flags of Megatron-LM's training
        self._legacy = legacy_flag if self.is_run else (legacy or {}).get
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

    def read_words(self, words: Sequence[Word]) -> None:
        """Take a command line: flags, each followed by its values."""
        for flag, values in _grouped(words):
            spelling, equals, attached = flag.text.partition("=")
            if not flag.is_flag:
                self._wrong(f"{flag.text!r} does not belong to a flag: values follow a flag that starts with --")
            else:
                rank = FLAG if flag.source == "flag" else FILE
                self._take_spelling(spelling, [attached, *values] if equals else values, source=flag.source, rank=rank)

    def read_file(self, path: str) -> None:
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

    def read_defaults(self, defaults: Mapping[str, Any], prog: str) -> None:
        """Take the command's own defaults, which replace those of its flags."""
        for field, value in defaults.items():
            self._offer(self._by_field[field], Given(value, f"default of {prog}", COMMAND))

    def read_checkpoint(self, reader: CheckpointReader | None) -> None:
        """Take the architecture from the settings saved in the checkpoint that ``--load`` names."""
        if not self.value("use_checkpoint_args"):
            return
        load, pretrained = self.value("load"), self.value("pretrained_checkpoint")
        path = load or pretrained
        if path is None:
            asked = self.given["use_checkpoint_args"]
            taker = "this command" if asked.rank == COMMAND else "--use-checkpoint-args"
            self._wrong(f"{taker} takes the architecture from a checkpoint: name its folder with --load")
            self.faulted.update(spec.positive for spec in self._checkpoint_fields())
            return
        assert reader is not None, "a command with --use-checkpoint-args passes checkpoint_config"
        saved = reader(path, self.value("ckpt_step") if load else None)
        if saved is None and load and pretrained:  # a run that has saved nothing yet
            path, saved = pretrained, reader(pretrained, None)
        if saved is None:
            self._wrong(
                f"there is no checkpoint in {path} to take the architecture from: give another --load or the sizes as "
                "flags"
            )
            self.faulted.update(spec.positive for spec in self._checkpoint_fields())
            return
        saved = self._with_one_tokenizer(saved)
        for spec in self._checkpoint_fields():
            value = spec.restore(saved.get(spec.group, {}).get(spec.field))
            if value is not None:
                self._offer(spec, Given(value, f"checkpoint {path}", CHECKPOINT))

    def _with_one_tokenizer(self, saved: Mapping[str, Any]) -> Mapping[str, Any]:
        """The saved settings, without those of the tokenizer if another kind is given; the vocabulary size stays."""
        own: Mapping[str, Any] = saved.get("tokenizer") or {}
        kind, rows = own.get("tokenizer_type"), own.get("vocab_size")
        given = {field: each.value for field, each in self.given.items() if each.rank > CHECKPOINT}
        if kind == "NullTokenizer" and not given.keys().isdisjoint(("vocab_file", "merge_file", "tokenizer_model")):
            given.setdefault("tokenizer_type", None)  # what follows from the files
        if given.get("tokenizer_type", kind) == kind:
            return saved
        if kind == "NullTokenizer" and rows is not None:
            rows += 1  # the id that ends documents
        return {**saved, "tokenizer": {"vocab_size": rows}}

    def _checkpoint_fields(self) -> Iterator[FlagSpec]:
        for spec in self._by_field.values():
            if spec.field == "tokenizer_model" and not self.value("use_tokenizer_model_from_checkpoint_args"):
                continue
            taken = spec.options.architecture or spec.options.from_checkpoint
            if taken or (spec.field in MODEL_PARALLEL_FIELDS and self.value("use_mp_args_from_checkpoint_args")):
                yield spec

    def finish(self) -> None:
        """Settle flags that yield to others and report the required ones that are missing."""
        if self._underscored:
            self.notes.append(f"{', '.join(dict.fromkeys(self._underscored))}: read with dashes instead of underscores")
        for flag, path in self._deepspeed:
            self._take_deepspeed(flag, path)
        for spec, given in self._yielding:
            if spec.field not in self.given or self.given[spec.field].rank < given.rank:
                self.notes.append(f"{given.source}: taken as {_flag_text(spec, given.value)}")
                self._offer(spec, given)
        missing = [spec for spec in self._by_field.values() if spec.required and spec.field not in self.given]
        missing = [spec for spec in missing if spec.positive not in self.faulted]
        if missing:
            named = (f"{spec.positive} ({_within_a_sentence(spec.options.help)})" for spec in missing)
            self._wrong(f"missing: {', '.join(named)}")
            self.faulted.update(spec.positive for spec in missing)

    def build(self, group: type) -> Any:
        """The group with its values; a missing required field gets a stand-in, so that other rules can still run."""
        specs = [spec for spec in flags_of(group) if not spec.options.internal]
        wanted = [spec for spec in specs if spec.required or spec.field in self.given]
        return group(
            **{
                spec.field: self.given[spec.field].value if spec.field in self.given else spec.stand_in()
                for spec in wanted
            }
        )

    def _take_key(self, key: str, value: Any, *, source: str, group: str | None = None) -> None:
        """One entry of a settings file, by field name or by flag name without dashes."""
        if value is None:
            return
        spec = self._by_field.get(key.replace("-", "_"))
        if spec is None:
            spelling = "--" + key.replace("_", "-")
            if self._is_known(spelling):
                values = [] if value is True else value if isinstance(value, list) else [value]
                self._take_spelling(spelling, values, source=source, rank=FILE)
                return
            hint = did_you_mean(key.replace("-", "_"), self._by_field, words=LEGACY_WORDS)
            self._wrong(f"{source}: there is no setting {key}{hint}")
        elif spec.group == group_name(CommandConfig):
            self._wrong(f"{source}: {key} is given on the command line only")
        elif group is not None and spec.group != group:
            self._wrong(f"{source}: {key} belongs under {spec.group}, not under {group}")
        else:
            self._take(spec, value, source=source, rank=FILE)

    def _take_spelling(self, spelling: str, values: list[Any], *, source: str, rank: int) -> None:
        """One flag by its spelling, of ours or of Megatron-LM's."""
        with_dashes = spelling.replace("_", "-")
        if not self._is_known(spelling) and self._is_known(with_dashes):
            self._underscored.append(spelling)
            spelling = with_dashes
        if spelling in self._by_spelling:
            spec, switch = self._by_spelling[spelling]
            if isinstance(switch, str):
                self._take_switch(spec, spelling, switch, values, source=source, rank=rank)
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
        if owner is not None:
            self._wrong(f"{where}{spelling} belongs to {owner}; leave it out, or train such a model")
        elif legacy is not None:
            self._take_legacy(spelling, legacy, values, source=source, rank=rank)
        else:
            meant = meant_by(spelling, self._by_spelling, words=LEGACY_WORDS)
            self._wrong(f"{where}there is no flag {spelling}{f' (did you mean {meant}?)' if meant else ''}")
            if meant and self._by_spelling[meant][0].field not in self.given:
                self.faulted.add(self._by_spelling[meant][0].positive)

    def _take_switch(
        self, spec: FlagSpec, spelling: str, value: str, values: list[Any], *, source: str, rank: int
    ) -> None:
        """A flag without a value that stands for a choice of another flag; two that differ contradict each other."""
        if values == [False]:
            return
        known = self.given.get(spec.field)
        if values:
            self._wrong(
                f"{spelling} is on or off and takes no value, so {' '.join(map(str, values))!r} cannot follow it"
            )
            self.faulted.add(spec.positive)
        elif known is None or known.rank != rank or known.value == value:
            self._take(spec, value, source=source, rank=rank)
        elif both := spec.options.together.get(frozenset({known.value, value})):
            self.given[spec.field] = Given(both, source, rank)
        else:
            other = next((flag for flag, each in spec.options.switches.items() if each == known.value), None)
            named = other or _flag_text(spec, known.value)
            self._wrong(f"{named} and {spelling} are mutually exclusive; keep one")
            self.faulted.add(spec.positive)

    def _is_known(self, spelling: str) -> bool:
        if spelling in self._by_spelling or self._legacy(spelling) is not None:
            return True
        return self.is_run and (spelling in DEEPSPEED_CONFIG or self._owner_of(spelling) is not None)

    def _take_legacy(self, spelling: str, legacy: LegacyFlag, values: list[Any], *, source: str, rank: int) -> None:
        words = " ".join([spelling, *map(str, values)])
        if values and all(str(value) in legacy.harmless for value in values):
            return
        legacy = legacy.values.get(words.partition(" ")[2], legacy)
        if legacy.verdict == "refused":
            self._say(self.problems, words, legacy.word)
        elif legacy.verdict == "ignored":
            self._say(self.notes, words, legacy.word, one=" has no effect", more=" have no effect")
        else:
            self._take_as(words, legacy, values, rank=rank)

    def _take_as(self, words: str, legacy: LegacyFlag, values: list[Any], *, rank: int) -> None:
        """A flag under another name: the fields it means, with a remark."""
        spelling = words.partition(" ")[0]
        meant = [
            (self._by_field[name], values or True if value is None else value) for name, value in legacy.sets.items()
        ]
        text = f"taken as {' '.join(_flag_text(spec, value) for spec, value in meant)}"
        if not legacy.yields:
            self.renamed[spelling] = f"{words}: {text}{_reason(legacy.word)}"
            self.notes.append(self.renamed[spelling])
        for spec, raw in meant:
            try:
                given = Given(spec.convert(raw), spelling, rank)
                wrong = spec.out_of_bounds(given.value)
            except ConfigError as error:
                wrong = str(error)
            if wrong:
                self._wrong(f"{words} is {text}, and {wrong}")
                self.faulted.add(spec.positive)
            elif legacy.yields:
                self._yielding.append((spec, given))
            else:
                self._offer(spec, given)

    def _take_deepspeed(self, flag: str, path: str) -> None:
        """DeepSpeed's configuration file: settings that no flag gives, and contradictions of those that one does."""
        try:
            settings = deepspeed_settings(read_settings(path, flag=flag), where=f"{flag} {path}")
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
                taken.append(_flag_text(spec, value))
            elif known is not None and known.value != value:
                self._wrong(
                    f"{path} has {key} {raw or 0}, but {_flag_text(spec, known.value)} is given; make them agree"
                )
        if taken:
            self.notes.append(f"{flag} {path}: taken as {' '.join(taken)}")
        if settings.without_effect:
            self.notes.append(f"{flag} {path}: {', '.join(settings.without_effect)} have no effect")

    def _take(self, spec: FlagSpec, raw: Any, *, source: str, rank: int) -> None:
        try:
            value = spec.convert(raw)
        except ConfigError as error:
            self._wrong(str(error) if rank == FLAG else f"{source}: {error}")
            self.faulted.add(spec.positive)
            return
        word = raw[0] if isinstance(raw, list) else raw
        if isinstance(word, str) and word in spec.options.renamed_values:
            self.notes.append(
                f"{spec.positive} {word}: taken as {value}{_reason(spec.options.renamed_values[word][1])}"
            )
        self._offer(spec, Given(value, source, rank))

    def _offer(self, spec: FlagSpec, given: Given) -> None:
        """Keep the value unless one of higher rank is known; among equal ranks the later one is used."""
        known = self.given.get(spec.field)
        if known is None or known.rank <= given.rank:
            if known is not None and known.rank == given.rank and known.value != given.value:
                before, after = _plain(known.value), _plain(given.value)
                self.notes.append(f"{spec.positive} is given twice, {before} and {after}: the last one is used")
            self.given[spec.field] = given

    def _wrong(self, sentence: str) -> None:
        self.problems.append(sentence)

    def _say(self, sentences: list[str], words: str, reason: str, *, one: str = "", more: str = "") -> None:
        """Add a remark about a flag; flags with the same reason share one sentence."""
        at, flags = self._said.setdefault((reason, one), (len(sentences), []))
        flags.append(words)
        sentences[at : at + 1] = [f"{', '.join(flags)}{more if flags[1:] else one}: {reason}"]

    def _wrong_file(self, sentence: str) -> None:
        """A settings file cannot be read: it may hold any setting that was not given."""
        self._wrong(sentence)
        self.faulted.update(spec.positive for field, spec in self._by_field.items() if field not in self.given)


def parse_run(
    argv: Sequence[str],
    *,
    prog: str,
    world_size: int,
    extra_groups: Sequence[type],
    owner_of: FlagOwner,
    checkpoint_config: CheckpointReader | None,
    defaults: Mapping[str, Any],
) -> RunConfig:
    """See ``RunConfig.parse``."""
    groups = (*CORE_GROUPS, *extra_groups, CommandConfig)
    intake = _read_command_line(argv, groups, prog, owner_of=owner_of, defaults=defaults)
    for path in intake.value("config"):
        intake.read_file(path)
    intake.read_defaults(defaults, prog)
    intake.read_checkpoint(checkpoint_config)
    intake.finish()
    command: CommandConfig = intake.build(CommandConfig)
    out_of_bounds = dict(_out_of_bounds(command))
    problems = [*intake.problems, *out_of_bounds.values()]
    asked = command.world_size if command.dry_run else None
    run = RunConfig(
        **{group_name(group): intake.build(group) for group in CORE_GROUPS},
        extra=tuple(intake.build(group) for group in extra_groups),
        world_size=world_size if asked is None else max(asked, 1),
        command=command,
    )
    object.__setattr__(run, "provenance", {spec.field: intake.source(spec, run.value(spec)) for spec in run.flags()})
    problems += [as_typed(run, sentence) for sentence in failures(run, faulted={*intake.faulted, *out_of_bounds})]
    if problems:
        raise ConfigError(listed(problems))
    unused = [intake.renamed.get(flag) for flags, _ in without_effect(run) for flag in flags]
    object.__setattr__(run, "notes", tuple(note for note in intake.notes if note not in unused))
    object.__setattr__(run, "notes", (*run.notes, *remarks(run)))
    return run


def value_given(argv: Sequence[str], group: type, field: str) -> Any:
    """One field as given by flags and files, or None, without any check: for a command whose groups depend on it."""
    intake = Intake((*CORE_GROUPS, group, CommandConfig))
    intake.read_words(list(words_of(argv)))
    for path in intake.value("config"):
        intake.read_file(path)
    return intake.given[field].value if field in intake.given else None


def parse_groups(
    argv: Sequence[str], *groups: type, prog: str, about: str = "", legacy: Mapping[str, LegacyFlag] | None = None
) -> tuple[Any, ...]:
    """The groups of a tool from its command line, in the order asked; ``--help`` prints and exits with code 0.

    ``legacy``: what becomes of flags of other programs' tools. Remarks go to standard error.
    Raises ConfigError with every failure at once.
    """
    intake = _read_command_line(argv, groups, prog, about, legacy)
    intake.finish()
    built = tuple(intake.build(group) for group in groups)
    problems = [*intake.problems, *(sentence for group in built for _, sentence in _out_of_bounds(group))]
    if problems:
        raise ConfigError(listed(problems))
    for note in intake.notes:
        print(note, file=sys.stderr)  # noqa: T201  (a tool has no start-up report)
    return built


def _out_of_bounds(group: Any) -> Iterator[tuple[str, str]]:
    """Flags whose numbers are out of bounds, with a sentence for each."""
    for spec in flags_of(type(group)):
        sentence = spec.out_of_bounds(getattr(group, spec.field))
        if sentence:
            yield spec.positive, sentence


def _read_command_line(
    argv: Sequence[str],
    groups: Sequence[type],
    prog: str,
    about: str = "",
    legacy: Mapping[str, LegacyFlag] | None = None,
    *,
    owner_of: FlagOwner = nobody,
    defaults: Mapping[str, Any] | None = None,
) -> Intake:
    if {"-h", "--help"} & set(argv):
        shared = {*CORE_GROUPS, CommandConfig}
        shown = sorted(groups, key=shared.__contains__)  # the command's own groups first
        print(format_help(shown, prog=prog, about=about, defaults=defaults), end="")  # noqa: T201  (what --help is for)
        sys.exit(0)
    intake = Intake(groups, legacy, owner_of=owner_of)
    intake.read_words(list(words_of(argv)))
    return intake


def _grouped(words: Sequence[Word]) -> Iterator[tuple[Word, list[str]]]:
    """Each flag with the words up to the next flag; a word before the first flag is yielded alone."""
    at = 0
    while at < len(words):
        flag, at = words[at], at + 1
        values: list[str] = []
        while flag.is_flag and at < len(words) and not words[at].is_flag:
            values.append(words[at].text)
            at += 1
        yield flag, values


def _flag_text(spec: FlagSpec, value: Any) -> str:
    return spec.positive if value is True else f"{spec.positive} {_plain(value)}"


def _within_a_sentence(help: str) -> str:
    """The sentence without its full stop, in lower case unless it starts with an abbreviation."""
    return f"{help[0] if help[1:2].isupper() else help[0].lower()}{help[1:-1]}"


def _reason(word: str) -> str:
    return f"; {word}" if word else ""


def _plain(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
