"""The windows of a run, their order, and texts that are mixed by weights."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
from checkpoints import SMALL, add_tokenizer, put_bos_first, write_text

from slidesparse.errors import InputError
from slidesparse.files.mixed_texts import weighted, without_folder
from slidesparse.models.perplexity import measure_perplexity
from slidesparse.offline.calibrate import calibration
from slidesparse.offline.calibrate.calibration import (
    Calibration,
    calibration_windows,
    cut_windows,
    ids_of,
    load_tokenizer,
    tokens_before,
)
from slidesparse.recovery.options import RecoverOptions, parse_amount
from slidesparse.recovery.windows import Windows, read_windows

CONFIG = transformers.LlamaConfig(**SMALL)


def numbered(text: int, count: int, window: int = 4) -> torch.Tensor:
    """Windows whose tokens say from which text and place they are."""
    return (1000 * text + torch.arange(count))[:, None].expand(count, window).to(torch.int32)


def order(windows: Windows, steps: int, size: int) -> list[int]:
    return [int(one) for step in range(steps) for one in windows.step(step, size)[:, 0]]


def test_each_text_is_gone_through_before_it_is_gone_through_again() -> None:
    windows = Windows([numbered(0, 5), numbered(1, 40)], numbered(9, 1), [1.0, 3.0], seed=0)
    seen = order(windows, 10, 8)
    first, second = ([one for one in seen if one // 1000 == text] for text in (0, 1))
    assert len(first) == pytest.approx(20, abs=1)
    for start in range(0, 15, 5):
        assert sorted(first[start : start + 5]) == [0, 1, 2, 3, 4]
    assert first[:5] != first[5:10]
    assert sorted(second[:40]) == list(range(1000, 1040))
    # In their shares in each part of a run, too.
    assert all(1 <= sum(one < 1000 for one in seen[i : i + 8]) <= 3 for i in range(0, 80, 8))


def test_a_step_depends_on_the_seed_and_its_number_alone() -> None:
    def make(seed: int) -> Windows:
        return Windows([numbered(0, 50), numbered(1, 7)], numbered(9, 1), [1.0, 1.0], seed)

    assert order(make(0), 6, 8) == order(make(0), 6, 8)
    assert torch.equal(make(0).step(5, 8), torch.tensor(order(make(0), 6, 8)[40:])[:, None].expand(8, 4))
    assert order(make(0), 6, 8) != order(make(1), 6, 8)


def test_a_document_of_several_texts_is_not_trained_and_evaluated_on(tmp_path: Path) -> None:
    add_tokenizer(tmp_path / "m")
    rng = random.Random(0)
    some = ["".join(rng.choices("abcdefghij", k=14)) for _ in range(40)]  # 16 tokens with the empty line
    for name, inside in (("one", some[:30] + some[:10]), ("two", some[20:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in inside))
    texts = tuple(f"{tmp_path / name}.jsonl" for name in ("one", "two"))
    found = read_windows(tmp_path / "m", CONFIG, RecoverOptions(texts, tokens=99, batch=64, window=8, eval_windows=8))
    trained, evaluated = ([*map(tuple, some.tolist())] for some in (torch.cat(found.train), found.evaluation))
    assert (len(trained) + len(evaluated), len(found.train[1])) == (78, 17)
    assert not {*trained} & {*evaluated}


class Counting(Windows):
    """Counts the places of the training order that are looked up."""

    places = 0

    def texts(self, start: int, end: int) -> torch.Tensor:
        self.places += end - start
        return super().texts(start, end)


def test_work_is_linear_in_the_steps() -> None:
    windows = Counting([numbered(0, 50), numbered(1, 7)], numbered(9, 1), [1.0, 1.0], 0)
    seen = order(windows, 100, 8)
    assert windows.places <= 2 * 100 * 8
    resumed = Counting(windows.train, windows.evaluation, [1.0, 1.0], 0)
    assert [int(one) for step in range(60, 100) for one in resumed.step(step, 8)[:, 0]] == seen[60 * 8 :]
    assert resumed.places <= 2 * 100 * 8
    assert resumed.step(3, 8)[:, 0].tolist() == seen[24:32]  # and back


def test_few_tokens_to_calibrate_on_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of a long text, too, where it is the options that take few."""
    write_text(tmp_path / "text.txt", 4000)
    add_tokenizer(tmp_path / "m")
    for samples, said in ((64, ["1024 tokens are few to calibrate on: 16384 and more lose less"]), (1024, [])):
        caplog.clear()
        calibration_windows(tmp_path / "m", CONFIG, Calibration(str(tmp_path / "text.txt"), samples, 16))
        assert [one.getMessage() for one in caplog.records] == said


def test_windows_begin_with_what_the_tokenizer_puts_before_a_text(tmp_path: Path) -> None:
    write_text(tmp_path / "text.txt", 200)
    for name in ("bos", "plain"):
        add_tokenizer(tmp_path / name)
    put_bos_first(tmp_path / "bos")
    assert tokens_before(load_tokenizer(tmp_path / "bos")).tolist() == [1]
    assert tokens_before(load_tokenizer(tmp_path / "plain")).tolist() == []
    text = Calibration(str(tmp_path / "text.txt"), 8, 16)
    plain, begun, old = (
        calibration_windows(tmp_path / name, CONFIG, one)
        for name, one in (("plain", text), ("bos", text), ("bos", Calibration(text.file, 8, 16, bos=False)))
    )
    assert (begun[:, 0] == 1).all()
    assert not (begun[:, 1:] == 1).any()
    assert int((old == 1).sum()) <= 1
    assert plain.shape == begun.shape == old.shape == (8, 16)
    wanted = RecoverOptions((text.file,), tokens=1000, batch=64, window=16, eval_windows=4)
    found = read_windows(tmp_path / "bos", CONFIG, wanted)
    assert (found.evaluation[:, 0] == 1).all()
    assert all((one[:, 0] == 1).all() for one in found.train)
    evaluation = {tuple(one.tolist()) for one in found.evaluation}
    assert evaluation.isdisjoint(tuple(one.tolist()) for one in found.train[0])


def test_stretches_of_a_text_have_the_tokens_of_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    words = tokenizers.Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    parts = (
        tokenizers.pre_tokenizers.Split(words, "isolated"),
        tokenizers.pre_tokenizers.ByteLevel(False, use_regex=False),
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(list(parts))  # as Qwen's and Llama 3's
    text = "def one(two):\n    return 2\n\n\n" * 40 + "a b\n\nc d\n\n    e\n\n" * 40
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    how = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "<unk>"], initial_alphabet=alphabet)
    made.train_from_iterator([text], how)
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>")
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    asked: list[int] = []
    monkeypatch.setattr(calibration, "STRETCH", 8)
    monkeypatch.setattr(calibration, "ids_of", lambda *a, **how: asked.append(len(a[1])) or ids_of(*a, **how))
    assert calibration.encode(tokenizer, text).tolist() == whole
    assert sum(asked) > 20
    assert calibration.encode(tokenizer, "").tolist() == []


def test_a_text_that_has_it_already_gets_no_second_one() -> None:
    tokens, before = torch.tensor([1, 5, 6, 7, 8, 9]), torch.tensor([1])
    assert cut_windows(tokens, 3, before).tolist() == [[1, 5, 6], [1, 7, 8]]
    assert cut_windows(tokens[1:], 3, before).tolist() == [[1, 5, 6], [1, 7, 8]]
    with pytest.raises(InputError, match="tokens of a window; got 1; needed more than 1"):
        cut_windows(tokens, 1, before)


def test_perplexity_reads_it_before_each_window_and_does_not_score_it() -> None:
    read: list[list[int]] = []

    def logits(ids: torch.Tensor) -> torch.Tensor:
        read.extend(ids.tolist())
        return torch.zeros(*ids.shape, 32)

    found = measure_perplexity(logits, torch.arange(10, 18), 5, 3, before=torch.tensor([1]))
    assert read == [[1, 10, 11, 12, 13], [1, 13, 14, 15, 16], [1, 16, 17]]
    assert (found.tokens, round(found.perplexity, 3)) == (8, 32.0)


def test_texts_are_mixed_by_weights(tmp_path: Path) -> None:
    add_tokenizer(tmp_path / "m")
    (tmp_path / "a.txt").write_text("a" * 400)
    (tmp_path / "b.txt").write_text("b" * 400)
    text = Calibration(f"{tmp_path / 'a.txt'}:3", 8, 16, more=(str(tmp_path / "b.txt"),))
    found = calibration_windows(tmp_path / "m", CONFIG, text)
    assert sorted(found[:, 0].tolist()) == [3] * 6 + [4] * 2
    assert text.names == "a.txt, b.txt"


@pytest.mark.parametrize("weight", ["0", "1e300", "1e-300", "inf", "nan"])
def test_a_weight_that_is_none(weight: str) -> None:
    with pytest.raises(InputError, match=rf"weight of a\.txt; got {weight}; needed 1e-06 to 1e\+06"):
        weighted(f"a.txt:{weight}")


@pytest.mark.parametrize("amount", ["0", "1e9", "9" * 400, "1.5T", ""])
def test_an_amount_that_is_none(amount: str) -> None:
    with pytest.raises(InputError, match="needed a number above 0, such as"):
        parse_amount(amount)


def test_a_record_names_files_without_their_folders_and_data_sets_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a.txt", "of:2"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    given = (f"{tmp_path}/a.txt:0.5", f"{tmp_path}/of:2", ".", "owner/data:python", "owner/data:2", "default")
    assert [*map(without_folder, given)] == ["a.txt:0.5", "of:2", tmp_path.name, *given[3:]]
