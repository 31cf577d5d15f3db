"""HTTP/2 as ts2021 needs it, sans-IO, both roles (RFC 9113), on top of the `h2` library.

Adds what h2 leaves to its user: bodies queue until windows allow them, received data is acknowledged when the
application took it, and every library error becomes one `ProtocolError`. No push, no priorities, no trailers.
"""

from __future__ import annotations

from collections.abc import Sequence

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings
from msgspec import Struct

from tsd.base.errors import ProtocolError

Headers = Sequence[tuple[str, str]]

STREAM_WINDOW_BYTES = 4 << 20
CONNECTION_WINDOW_BYTES = 16 << 20
MAX_STREAMS = 1000
MAX_FRAME_BYTES = 64 << 10
FRAME_HEADER_BYTES = 9
MAX_HEADER_LIST_BYTES = 64 << 10


class HeadersReceived(Struct, frozen=True):
    """Request (server) or response (client) headers; pseudo headers included. 1xx responses are left out."""

    stream_id: int
    headers: tuple[tuple[str, str], ...]

    def get(self, name: str, default: str = "") -> str:
        return next((value for key, value in self.headers if key == name), default)


class DataReceived(Struct, frozen=True):
    """Acknowledge `flow_bytes` once the data was taken."""

    stream_id: int
    data: bytes
    flow_bytes: int


class StreamFinished(Struct, frozen=True):
    """The peer's half is done; `error` is empty for a clean end."""

    stream_id: int
    error: str


class ConnectionFinished(Struct, frozen=True):
    """No stream goes on: GOAWAY or a violation."""

    reason: str


class WindowsChanged(Struct, frozen=True):
    """More can be sent, or more streams opened."""


class PingAnswered(Struct, frozen=True):
    payload: bytes


Event = HeadersReceived | DataReceived | StreamFinished | ConnectionFinished | WindowsChanged | PingAnswered


class Http2Machine:
    """One connection. Feed with `receive`; drain `take_bytes` and `take_events` after every call."""

    def __init__(self, *, is_client: bool) -> None:
        config = h2.config.H2Configuration(client_side=is_client, header_encoding="utf-8")
        self._h2 = h2.connection.H2Connection(config=config)
        self._is_client = is_client
        self._events: list[Event] = []
        self._queued: dict[int, bytearray] = {}
        self._ending: dict[int, bool] = {}
        self.is_closed = False
        self._h2.local_settings = h2.settings.Settings(
            client=is_client,
            initial_values={
                h2.settings.SettingCodes.MAX_CONCURRENT_STREAMS: MAX_STREAMS,
                h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: STREAM_WINDOW_BYTES,
                h2.settings.SettingCodes.MAX_FRAME_SIZE: MAX_FRAME_BYTES,
                h2.settings.SettingCodes.MAX_HEADER_LIST_SIZE: MAX_HEADER_LIST_BYTES,
                **({h2.settings.SettingCodes.ENABLE_PUSH: 0} if is_client else {}),
            },
        )
        # h2 took its limits from the settings it made itself.
        self._h2.max_inbound_frame_size = MAX_FRAME_BYTES
        self._h2.decoder.max_header_list_size = MAX_HEADER_LIST_BYTES
        self._h2.initiate_connection()
        self._h2.increment_flow_control_window(CONNECTION_WINDOW_BYTES)

    def receive(self, data: bytes) -> None:
        """Never raises: a violation closes the connection and is reported as an event."""
        if self.is_closed or not data:
            return
        try:
            events = self._h2.receive_data(data)
        except (h2.exceptions.H2Error, ValueError, LookupError, RecursionError) as err:
            self._close(f"HTTP/2 violation: {err}")
            return
        for event in events:
            self._translate(event)
        # h2 looks at a frame's length only once it has the whole frame.
        if len(getattr(self._h2.incoming_buffer, "_data", b"")) > MAX_FRAME_BYTES + FRAME_HEADER_BYTES:
            self._close("HTTP/2 violation: frame larger than announced")
        self._flush_all()

    def take_bytes(self) -> bytes:
        return bytes(self._h2.data_to_send())

    def take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    @property
    def can_open_stream(self) -> bool:
        if self.is_closed:
            return False
        return bool(self._h2.open_outbound_streams < self._h2.remote_settings.max_concurrent_streams)

    def open_stream(self, headers: Headers, body: bytes = b"", *, is_last: bool = True) -> int:
        """Client: send a request. Raises `ProtocolError` when the connection is closed or full."""
        try:
            stream_id: int = self._h2.get_next_available_stream_id()
            self._h2.send_headers(stream_id, list(headers), end_stream=is_last and not body)
        except (h2.exceptions.H2Error, ValueError) as err:
            raise ProtocolError(f"http2: {err}") from None
        if body or not is_last:
            self.send_data(stream_id, body, is_last=is_last)
        return stream_id

    def send_headers(self, stream_id: int, headers: Headers, *, is_last: bool = False) -> None:
        """Server: answer. Ignored when the stream is gone."""
        try:
            self._h2.send_headers(stream_id, list(headers), end_stream=is_last)
        except h2.exceptions.H2Error:
            self._drop(stream_id)

    def send_data(self, stream_id: int, data: bytes, *, is_last: bool = False) -> None:
        """Queue; goes out as windows allow. Ignored when the stream is gone."""
        if self.is_closed:
            return
        self._queued.setdefault(stream_id, bytearray()).extend(data)
        self._ending[stream_id] = is_last
        self._flush(stream_id)

    def queued_bytes(self, stream_id: int) -> int:
        return len(self._queued.get(stream_id, b""))

    def acknowledge(self, stream_id: int, flow_bytes: int) -> None:
        """Open the windows again after data was taken by the application."""
        if self.is_closed or flow_bytes <= 0:
            return
        try:
            self._h2.acknowledge_received_data(flow_bytes, stream_id)
        except (h2.exceptions.H2Error, ValueError):
            pass

    def reset_stream(self, stream_id: int) -> None:
        """Give up one stream (RST_STREAM CANCEL)."""
        self._drop(stream_id)
        if self.is_closed:
            return
        try:
            self._h2.reset_stream(stream_id, error_code=h2.errors.ErrorCodes.CANCEL)
        except h2.exceptions.H2Error:
            pass

    def ping(self, payload: bytes) -> None:
        """Eight bytes that the peer sends back (`PingAnswered`)."""
        if not self.is_closed:
            self._h2.ping(payload)

    def close(self) -> None:
        """Say GOAWAY; the bytes are in `take_bytes`."""
        if self.is_closed:
            return
        try:
            self._h2.close_connection()
        except h2.exceptions.H2Error:
            pass
        self.is_closed = True

    def _translate(self, event: h2.events.Event) -> None:
        match event:
            case h2.events.RequestReceived() | h2.events.ResponseReceived():
                headers = tuple((str(name), str(value)) for name, value in event.headers)
                self._events.append(HeadersReceived(event.stream_id, headers))
            case h2.events.DataReceived():
                self._events.append(DataReceived(event.stream_id, bytes(event.data), event.flow_controlled_length))
            case h2.events.StreamEnded():
                self._events.append(StreamFinished(event.stream_id, ""))
            case h2.events.StreamReset():
                self._drop(event.stream_id)
                self._events.append(StreamFinished(event.stream_id, f"stream reset ({_code_name(event.error_code)})"))
            case h2.events.WindowUpdated() | h2.events.RemoteSettingsChanged():
                self._events.append(WindowsChanged())
            case h2.events.PingAckReceived():
                self._events.append(PingAnswered(bytes(event.ping_data)))
            case h2.events.ConnectionTerminated():
                extra = (event.additional_data or b"").decode("utf-8", "replace")
                self._close(f"GOAWAY ({_code_name(event.error_code)}){': ' + extra if extra else ''}")

    def _close(self, reason: str) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._queued.clear()
            self._ending.clear()
            self._events.append(ConnectionFinished(reason))

    def _drop(self, stream_id: int) -> None:
        self._queued.pop(stream_id, None)
        self._ending.pop(stream_id, None)

    def _flush_all(self) -> None:
        for stream_id in list(self._queued):
            if self.is_closed:
                return
            self._flush(stream_id)

    def _flush(self, stream_id: int) -> None:
        queue = self._queued[stream_id]
        try:
            while queue:
                window = self._h2.local_flow_control_window(stream_id)
                count = min(window, self._h2.max_outbound_frame_size, len(queue))
                if count <= 0:
                    return
                is_last = self._ending[stream_id] and count == len(queue)
                self._h2.send_data(stream_id, bytes(queue[:count]), end_stream=is_last)
                del queue[:count]
                if is_last:
                    self._drop(stream_id)
                    return
            if self._ending[stream_id]:
                self._h2.end_stream(stream_id)
            self._drop(stream_id)
        except h2.exceptions.H2Error:
            self._drop(stream_id)


def _code_name(code: object) -> str:
    name = getattr(code, "name", None)
    return str(name if name is not None else code)
