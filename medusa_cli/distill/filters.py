"""Filters for distilled conversations: detection of answers that only refuse."""

import re

from medusa_cli.data.conversation import Conversation

LONGEST = 600  # characters; a longer answer goes on to something else after the refusal
_REFUSAL = re.compile(
    r"\W*(?:unfortunately,? |(?:I(?: am|'m) (?:very |really |so )?sorry|I apologi[sz]e|sorry|my apologies)[,.;]? ?"
    r"(?:but )?)?"
    r"(?:as an? [^.]{0,60}?, ?)?"
    r"(?:(?:I|we) (?:can ?not|can't|could ?n[o']t|won't|will not|do not|don't|am (?:unable|not able|not allowed)"
    r"|must (?:decline|refuse))|I'm (?:unable|not able|not allowed))(?: to)?(?: \w+){0,2}? "
    r"(?:assist|help|provide|fulfil\w*|comply|answer|support|engage|discuss|generate|create|continue|participate|do)\b",
    re.IGNORECASE,
)


def is_refusal(answer: str) -> bool:
    """Returns True for a short answer that begins with a refusal, such as "I'm sorry, but I can't assist with that"."""
    return len(answer) <= LONGEST and _REFUSAL.match(answer.replace("\u2019", "'")) is not None


def refuses(conversation: Conversation) -> bool:
    """Returns True if any answer in a conversation is a refusal."""
    answers = (turn["content"] for turn in conversation.messages if turn["role"] == "assistant")
    return any(map(is_refusal, answers))
