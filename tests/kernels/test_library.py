"""The library is compiled once, by whoever comes first; where that fails the reference serves."""

import logging
import random
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pdserve.engine.step import StepPlan
from pdserve.kernels import library, reference
from pdserve.kernels.cpu import CpuKernels, load_kernels
from pdserve.kernels.library import LibraryError, compile_into, load_library
from tests.checkpoints import VOCAB_SIZE, make_llama_checkpoint
from tests.engine.steps import generate, make_engine, make_row, table, tokens_of

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

CPU = torch.device("cpu")


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
def test_two_that_compile_at_once_leave_one_file_and_a_third_compiles_nothing(tmp_path):
    folder = tmp_path / "kernels"
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(compile_into, (folder, folder))
    assert first == second
    assert list(folder.iterdir()) == [first]
    finished = first.stat().st_mtime_ns
    assert compile_into(folder).stat().st_mtime_ns == finished


def test_a_folder_that_others_may_write_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(LibraryError, match="can be written by others"):
        compile_into(tmp_path)


def test_a_folder_that_cannot_be_made_is_an_error_that_names_it_and_the_variable(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LibraryError, match=r"file.*XDG_CACHE_HOME"):
        compile_into(tmp_path / "file" / "kernels")


def test_without_a_compiler_the_reference_serves_and_one_warning_says_why(tmp_path, monkeypatch, caplog, one_thread):
    monkeypatch.setattr(library, "COMPILER", str(tmp_path / "no-such-compiler"))
    load_library.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert load_kernels(torch.float32, CPU) is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "no-such-compiler" in caplog.text


def test_source_that_does_not_compile_is_an_error_with_the_compilers_words(tmp_path, monkeypatch):
    sources = tmp_path / "cpp"
    sources.mkdir()
    (sources / "broken.cpp").write_text("int broken(")
    monkeypatch.setattr(library, "SOURCES", sources)
    with pytest.raises(LibraryError, match=r"broken\.cpp"):
        compile_into(tmp_path / "kernels")
    assert list((tmp_path / "kernels").iterdir()) == []


def test_one_thread_gets_the_compiled_kernels(one_thread):
    assert isinstance(load_kernels(torch.bfloat16, CPU), CpuKernels)
    assert load_kernels(torch.float16, CPU) is None


def test_several_threads_are_left_to_the_reference(two_threads):
    assert load_kernels(torch.bfloat16, CPU) is None


def test_an_engine_on_the_reference_draws_the_same_tokens_as_one_on_the_compiled_kernels(tmp_path, one_thread):
    source = random.Random(5)
    model_dir = make_llama_checkpoint(tmp_path / "model", head_dim=16)
    lengths, drawn = (45, 33, 16, 3), {}
    prompts = [[source.randrange(4, VOCAB_SIZE) for _ in range(length)] for length in lengths]
    for serves_reference in (True, False):
        engine = make_engine(model_dir)
        assert engine.model.native is not None
        if serves_reference:
            engine.model.native, engine.model.kernels, engine.model.stack = None, reference, None
            engine.attach(engine._pool)
        tables = [table(4 * index, 4) for index in range(len(prompts))]
        tokens = [generate(engine, prompts[i], 1, chunk=20, blocks=tables[i])[0] for i in range(len(prompts))]
        steps = [tokens]
        for _ in range(3):
            rows = tuple(
                make_row([steps[-1][i]], len(prompts[i]) + len(steps) - 1, key=i, blocks=tables[i])
                for i in range(len(prompts))
            )
            result = tokens_of(engine.step(StepPlan(0, rows)))
            steps.append([result[i] for i in range(len(prompts))])
        drawn[serves_reference] = steps
    assert drawn[True] == drawn[False]
