"""A tokenizer of 512 words, made in memory."""

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def tokenizer():
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{number}": number for number in range(3, 512)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="</s>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="</s>"
    )
