"""Documents from text: loss on every token, the end-of-sequence token included."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxtrain.data.packing import Document
from jaxtrain.data.records import Record
from jaxtrain.data.sources.base import Documents, SourceTools
from jaxtrain.data.sources.files import FileDocuments, Files, text_of


@dataclass(frozen=True, kw_only=True)
class Text(Files):
    """column: that holds the text."""

    column: str = "text"

    def open(self, tools: SourceTools) -> Documents:
        encode, end = tools.tokenizer.encode, tools.tokenizer.eos_token_id

        def made(record: Record, where: str) -> list[Document]:
            tokens = [*encode(text_of(record, self.column, where), add_special_tokens=False), end]
            weights = np.ones(len(tokens), np.float32)
            return [Document(tokens=np.asarray(tokens, np.int32), loss_weights=weights, origin=where)]

        return FileDocuments(self, made)
