"""What transformers generates greedily in fp32, as tokens and as the text that a server must show."""

from pathlib import Path

import torch

LICENSE = Path(__file__).resolve().parents[2] / "LICENSE"


class Oracle:
    """One model. Prompts are pieces of one English text; those at different offsets share no block."""

    def __init__(self, model_dir: Path):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(model_dir)
        self._ids: list[int] = self._tokenizer(LICENSE.read_text()).input_ids
        self._texts: dict[tuple[tuple[int, ...], int], tuple[str, int]] = {}

    def prompt(self, offset: int, length: int) -> list[int]:
        assert offset + length <= len(self._ids)
        return self._ids[offset : offset + length]

    def answer(self, prompt: list[int], max_tokens: int) -> tuple[str, int]:
        """The text after the prompt, and how many tokens were generated."""
        key = (tuple(prompt), max_tokens)
        if key not in self._texts:
            ids = self._generate(prompt, max_tokens)
            shown = ids[:-1] if ids[-1] in self._eos_ids else ids
            before, whole = self._tokenizer.decode(prompt), self._tokenizer.decode(prompt + shown)
            assert whole.startswith(before)
            self._texts[key] = (whole[len(before) :], len(ids))
        return self._texts[key]

    @property
    def _eos_ids(self) -> list[int]:
        eos = self._model.generation_config.eos_token_id
        return eos if isinstance(eos, list) else [eos]

    def _generate(self, prompt: list[int], max_tokens: int) -> list[int]:
        ids = torch.tensor([prompt])
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with torch.inference_mode():
                out = self._model.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False
                )
        finally:
            torch.set_num_threads(num_threads)
        return out[0, len(prompt) :].tolist()
