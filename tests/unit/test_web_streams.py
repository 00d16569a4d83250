"""Places of those who watch events: bounded from the moment in which they ask."""

import pytest

from steward.web.errors import TooMany
from steward.web.streams import Streams


def test_nobody_keeps_others_out() -> None:
    streams = Streams(each=2, most=3)
    places = [streams.take(1), streams.take(1)]
    with pytest.raises(TooMany, match="you"):
        streams.take(1)
    places.append(streams.take(2))
    with pytest.raises(TooMany, match="many watch"):
        streams.take(3)
    places.pop().leave()
    streams.take(3)


def test_a_place_is_given_back_once_even_where_it_was_never_used() -> None:
    streams = Streams(each=1, most=1)
    place = streams.take(1)
    place.leave()
    place.leave()
    again = streams.take(1)
    with pytest.raises(TooMany):
        streams.take(1)
    del again
    streams.take(1)
