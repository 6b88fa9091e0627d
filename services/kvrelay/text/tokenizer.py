"""Text to ids and back, for one model. Thread-safe; needs no torch.

Three ways in, one rule (TOK-04): ids of added tokens come from a chat template or from ids the caller gave,
never from text a user wrote.

    encode(text)        ordinary bytes only, literals of control tokens included; BOS if the tokenizer adds one
    encode_chat(...)    the template's own literals become control ids, the rest is ordinary bytes; no BOS is added,
                        a template that wants one writes it
    token ids           taken as they are, by the caller of this class
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers

from kvrelay.core.errors import BadRequest, ConfigError
from kvrelay.text.bytes import token_bytes_table
from kvrelay.text.escape import ControlLiterals, free_noncharacter
from kvrelay.text.template import ChatTemplate, load_template, special_token


class Tokenizer:
    def __init__(self, description: dict[str, Any], *, bos_token: str | None, template: ChatTemplate | None) -> None:
        """`description` is the content of tokenizer.json. Raises ConfigError."""
        self._plain = _build(description)
        added: list[dict[str, Any]] = description.get("added_tokens") or []
        self._ordinary = _OrdinaryEncoder(description, added)
        self._literals = ControlLiterals(token["content"] for token in added)
        self._template = template
        vocab = self._plain.get_vocab(with_added_tokens=True)
        self._bytes = token_bytes_table(description, vocab)
        self._longest = max(1, *map(len, self._bytes), *(len(token["content"].encode()) for token in added))
        self._bos_prefix = _bos_prefix(self._plain)
        token = vocab.get(bos_token) if bos_token else None
        self.bos_id: int | None = token if token is not None else next(iter(self._bos_prefix), None)

    @classmethod
    def from_directory(cls, path: Path) -> Tokenizer:
        """Reads tokenizer.json, tokenizer_config.json and chat_template.jinja. Raises ConfigError."""
        description = _read_json(path / "tokenizer.json")
        config_file = path / "tokenizer_config.json"
        config = _read_json(config_file) if config_file.is_file() else {}
        return cls(
            description, bos_token=special_token(config, "bos_token"), template=load_template(path, config)
        )

    @property
    def vocab_size(self) -> int:
        """Ids below it belong to the tokenizer; a model may pad its embedding beyond."""
        return len(self._bytes)

    @property
    def longest_token_bytes(self) -> int:
        """No token stands for more: a text of B bytes has at least B / this many tokens."""
        return self._longest

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str, *, add_bos: bool = True) -> list[int]:
        """BOS goes first only where the tokenizer itself would put one. Raises BadRequest for half surrogate pairs."""
        ids = self._ordinary.encode(_well_formed(text))
        return [*self._bos_prefix, *ids] if add_bos else ids

    def encode_chat(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> list[int]:
        """Ends with the opening of the assistant's turn. Raises BadRequest if there is no template or it refuses."""
        if self._template is None:
            raise BadRequest("this model has no chat template; use /v1/completions", param="messages")
        given = [messages, tools]
        if not self._literals.needs_marks(given):
            rendered = _well_formed(self._template.render(messages, tools))
            ids: list[int] = self._plain.encode(rendered, add_special_tokens=False).ids
            return ids
        mark = free_noncharacter(given)
        marked_messages, marked_tools = self._literals.mark(given, mark)
        rendered = _well_formed(self._template.render(marked_messages, marked_tools))
        return self._ordinary.encode_pieces(
            (text.replace(mark, ""), literal) for text, literal in self._literals.split(rendered)
        )

    def decode(self, ids: Iterable[int]) -> str:
        """Without control tokens. Bytes that are not UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Empty for control tokens and for ids the tokenizer does not have."""
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""


class _OrdinaryEncoder:
    """Encodes text in which added tokens mean nothing, and pieces between which chosen ones do.

    A second tokenizer, on which every added token is special and special tokens are not parsed. Each has an alias
    that is parsed: a literal no user can guess, put where the template wrote the real one. So all of a prompt goes
    through in one call, and prefix rules ("a space before the first word") hold as they do without the detour.
    """

    def __init__(self, description: dict[str, Any], added: list[dict[str, Any]]) -> None:
        all_special = [{**token, "special": True} for token in added]
        self._tokenizer = _build({**description, "added_tokens": all_special})
        self._tokenizer.encode_special_tokens = True
        unknown = description["model"].get("unk_token")
        self._control_ids = frozenset(token["id"] for token in added if token["content"] != unknown)
        nonce = secrets.token_hex(8)
        self._alias_of = {token["content"]: f"\ufdd0{nonce}.{token['id']}\ufdd0" for token in added}
        self._tokenizer.add_tokens(
            [
                tokenizers.AddedToken(
                    self._alias_of[token["content"]], lstrip=token["lstrip"], rstrip=token["rstrip"], normalized=False
                )
                for token in added
            ]
        )
        self._id_of_alias = {
            self._tokenizer.token_to_id(self._alias_of[token["content"]]): token["id"] for token in added
        }

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        if not self._control_ids.isdisjoint(ids):
            raise BadRequest("the text spells a control token that this tokenizer cannot write as ordinary text")
        return ids

    def encode_pieces(self, pieces: Iterable[tuple[str, str]]) -> list[int]:
        """(ordinary text, control literal after it or nothing), in order."""
        text = "".join(ordinary + self._alias_of.get(literal, "") for ordinary, literal in pieces)
        return [self._id_of_alias.get(token_id, token_id) for token_id in self.encode(text)]


def _bos_prefix(tokenizer: tokenizers.Tokenizer) -> list[int]:
    """What the tokenizer's post-processor puts before a text."""
    probe = tokenizer.encode("a", add_special_tokens=False).ids
    whole: list[int] = tokenizer.encode("a", add_special_tokens=True).ids
    for start in range(len(whole)):
        if whole[start : start + len(probe)] == probe:
            return whole[:start]
    return []


def _well_formed(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise BadRequest("the text holds half of a surrogate pair, which is no character") from None
    return text


def _build(description: dict[str, Any]) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(description))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read_json(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{file} holds no object")
    return data
