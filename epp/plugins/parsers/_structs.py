"""Declares the JSON of request bodies. This module is not compiled, because msgspec reads annotations at run time."""

from typing import Annotated, Any, Final, TypeAlias

import msgspec

Raw = msgspec.Raw


EMPTY: Final = Raw()
ABSENT: Final[Any] = EMPTY  # the default of a member for which null and absence differ


class Message(msgspec.Struct):
    """Decodes a message of a chat, or an item of the input to the responses API."""

    role: Raw = EMPTY
    content: Raw = EMPTY
    tool_calls: Raw = EMPTY
    tool_call_id: Raw = EMPTY
    name: Raw = EMPTY
    reasoning_content: Raw = EMPTY
    reasoning: Raw = EMPTY
    function_call: Raw = EMPTY
    refusal: Raw = EMPTY


class Part(msgspec.Struct):
    """Decodes a part of a message's content, in any of the APIs."""

    type: str | None = None
    text: Raw = EMPTY
    refusal: Raw = EMPTY
    thinking: Raw = EMPTY
    data: Raw = EMPTY
    image_url: Raw = EMPTY
    video_url: Raw = EMPTY
    audio_url: Raw = EMPTY
    input_audio: Raw = EMPTY
    source: Raw = EMPTY
    file: Raw = EMPTY
    uuid: Raw = EMPTY
    id: Raw = EMPTY
    tool_use_id: Raw = EMPTY
    name: Raw = EMPTY
    input: Raw = EMPTY
    content: Raw = EMPTY
    is_error: Raw = EMPTY


class Source(msgspec.Struct):
    """Decodes the source of a medium: data, URL or file id."""

    url: Raw = EMPTY
    data: Raw = EMPTY
    file_data: Raw = EMPTY
    file_id: Raw = EMPTY
    format: Raw = EMPTY
    media_type: Raw = EMPTY


TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]


# a single value: decoding a list or object could block the event loop
Scalar: TypeAlias = str | int | float | bool | None


class Body(msgspec.Struct):
    """Decodes the fields that all kinds of bodies have."""

    model: Scalar = None
    stream: Scalar = None
    cache_salt: Scalar = ABSENT


class Completion(Body):
    """Decodes a completion. `prompt_embeds`: vLLM's embeddings in place of a text, which clients then leave empty."""

    prompt: Raw = EMPTY
    prompt_embeds: Raw = EMPTY
    max_tokens: Scalar = None
    n: Scalar = None
    best_of: Scalar = None


class Front(Body):
    """Decodes what chat templates put before the messages of a conversation, or use for all messages."""

    chat_template: Raw = EMPTY
    chat_template_kwargs: Raw = EMPTY
    documents: Raw = EMPTY
    tools: Raw = EMPTY


class Embedding(Front):
    """Decodes texts, token ids or, for a model with a chat template, conversations. vLLM takes these as `input` or as `messages`."""

    input: Raw = EMPTY
    messages: Raw = EMPTY


class Chat(Front):
    messages: list[Message] | None = None
    max_completion_tokens: Scalar = None
    max_tokens: Scalar = None
    n: Scalar = None
    include_reasoning: Scalar = None


class Crowd(Front):
    messages: Raw = EMPTY
    max_completion_tokens: Scalar = None
    max_tokens: Scalar = None
    n: Scalar = None
    include_reasoning: Scalar = None


class Responses(Front):
    input: Raw = EMPTY
    instructions: Raw = EMPTY
    previous_response_id: Raw = EMPTY
    conversation: Raw = EMPTY
    prompt: Raw = EMPTY
    max_output_tokens: Scalar = None


class Conversation(Body):
    items: Raw = EMPTY


class Image(Body):
    prompt: Raw = EMPTY
    n: Scalar = None
