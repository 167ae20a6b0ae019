"""Random changes of messages: any field of any message inside, to any value or to an edge."""

import random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

EDGES = (0, 1, 2, 3, 16, 63, 64, 127, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)
BITS = {
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.TYPE_FIXED64: (0, 2**64 - 1),
    FieldDescriptor.TYPE_ENUM: (-(2**31), 2**31 - 1),
}


def random_value(field: FieldDescriptor, chance: random.Random) -> Any:
    if field.type in BITS:
        low, high = BITS[field.type]
        value = chance.choice([*EDGES, *(-edge for edge in EDGES), chance.getrandbits(64)])
        return max(low, min(high, value))
    if field.type == FieldDescriptor.TYPE_STRING:
        names = [
            "",
            "control",
            "staging",
            "k_cache/3",
            "k_cache/-1",
            "\N{SNOWMAN}" * 500,
            "x\n\x00",
        ]
        return chance.choice(names)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return chance.randbytes(chance.choice([0, 7, 8, 16, 64]))
    return chance.choice([0.0, float("nan"), -1.0])


def fields_of(message: Message) -> list[tuple[Message, FieldDescriptor]]:
    """Every field of the message and of the messages inside it."""
    found = []
    for field in message.DESCRIPTOR.fields:
        found.append((message, field))
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        if field.is_repeated:
            for item in getattr(message, field.name):
                found += fields_of(item)
        elif message.HasField(field.name):
            found += fields_of(getattr(message, field.name))
    return found


def mutate(message: Message, chance: random.Random) -> None:
    """Change one field somewhere."""
    fields = fields_of(message)
    if not fields:
        return
    owner, field = chance.choice(fields)
    if field.is_repeated:
        items = getattr(owner, field.name)
        action = chance.randrange(3)
        if action == 0:
            owner.ClearField(field.name)
        elif field.message_type is not None:
            items.add()
            if action == 1 and len(items) > 1:
                items[-1].CopyFrom(items[0])
        elif action == 1 and len(items):
            items[chance.randrange(len(items))] = random_value(field, chance)
        else:
            items.append(random_value(field, chance))
    elif field.message_type is not None:
        if chance.randrange(2):
            owner.ClearField(field.name)
        else:
            getattr(owner, field.name).SetInParent()
    elif chance.randrange(4):
        setattr(owner, field.name, random_value(field, chance))
    else:
        owner.ClearField(field.name)
