package main

import (
	"bytes"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	extproc "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/protobuf/proto"
)

const method = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"

var rawChecks = []check{
	{"goaway: a client that sent GOAWAY gets the answer to its open stream", goaway},
	{"rst after header", func() error { return resets(nil) }},
	{"rst during data", func() error { return resets(framed(requestHeaders())[:20]) }},
	{"rst after data", func() error {
		return resets(append(framed(requestHeaders()), framed(requestBody(completion, true))...))
	}},
	{"ping: between all frames, each answered with the same bytes", pings},
	{"max streams: one too many is refused, the others are answered", maxStreams},
}

// peer sends and reads single HTTP/2 frames.
type peer struct {
	*http2.Framer
	connection net.Conn
	block      bytes.Buffer
	encoder    *hpack.Encoder
	next       uint32
	streamsMax uint32
}

func connect() (*peer, error) {
	var connection net.Conn
	var err error
	if *useTLS {
		connection, err = tls.Dial("tcp", *addr, tlsConfig())
	} else {
		connection, err = net.Dial("tcp", *addr)
	}
	if err != nil {
		return nil, err
	}
	connection.SetDeadline(time.Now().Add(patience))
	p := &peer{Framer: http2.NewFramer(connection, connection), connection: connection, next: 1}
	p.encoder = hpack.NewEncoder(&p.block)
	p.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	io.WriteString(connection, http2.ClientPreface)
	p.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1 << 20})
	for {
		frame, err := p.ReadFrame()
		if err != nil {
			return nil, fmt.Errorf("greeting: %w", err)
		}
		if settings, ok := frame.(*http2.SettingsFrame); ok {
			if settings.IsAck() {
				return p, nil
			}
			p.streamsMax, _ = settings.Value(http2.SettingMaxConcurrentStreams)
			p.WriteSettingsAck()
		}
	}
}

// open opens a stream.
func (p *peer) open() uint32 {
	number := p.next
	p.next += 2
	p.block.Reset()
	for _, field := range [][2]string{{":method", "POST"}, {":scheme", "http"}, {":path", method}, {":authority", "picker"},
		{"content-type", "application/grpc"}, {"te", "trailers"}} {
		p.encoder.WriteField(hpack.HeaderField{Name: field[0], Value: field[1]})
	}
	p.WriteHeaders(http2.HeadersFrameParam{StreamID: number, BlockFragment: p.block.Bytes(), EndHeaders: true})
	return number
}

func framed(message proto.Message) []byte {
	payload, _ := proto.Marshal(message)
	return append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(payload))), payload...)
}

// outcome has the results of all streams: their messages, gRPC statuses and resets; and the answered pings.
type outcome struct {
	data   map[uint32][]byte
	status map[uint32]string
	resets map[uint32]http2.ErrCode
	pongs  [][8]byte
}

func (o *outcome) ended(number uint32) bool {
	_, reset := o.resets[number]
	return reset || o.status[number] != ""
}

// read reads frames until the condition holds.
func (p *peer) read(until func(*outcome) bool) (*outcome, error) {
	o := &outcome{map[uint32][]byte{}, map[uint32]string{}, map[uint32]http2.ErrCode{}, nil}
	for !until(o) {
		frame, err := p.ReadFrame()
		if err != nil {
			return o, err
		}
		number := frame.Header().StreamID
		switch frame := frame.(type) {
		case *http2.DataFrame:
			o.data[number] = append(o.data[number], frame.Data()...)
		case *http2.MetaHeadersFrame:
			for _, field := range frame.Fields {
				if field.Name == "grpc-status" {
					o.status[number] = field.Value
				}
			}
		case *http2.RSTStreamFrame:
			if o.status[number] == "" {
				o.resets[number] = frame.ErrCode
			}
		case *http2.PingFrame:
			if frame.IsAck() {
				o.pongs = append(o.pongs, frame.Data)
			}
		case *http2.GoAwayFrame:
			if frame.ErrCode != http2.ErrCodeNo {
				return o, fmt.Errorf("GOAWAY %v: %s", frame.ErrCode, frame.DebugData())
			}
		}
	}
	return o, nil
}

// kinds returns the kinds of the gRPC messages in the data of a stream.
func kinds(data []byte) (names []string) {
	for len(data) >= 5 {
		end := 5 + binary.BigEndian.Uint32(data[1:])
		answer := &extproc.ProcessingResponse{}
		if proto.Unmarshal(data[5:end], answer) != nil {
			return append(names, "garbage")
		}
		names, data = append(names, kind(answer)), data[end:]
	}
	return names
}

// exchange sends a request phase, headers and body, cut into small DATA frames. It calls between before each frame and at the end.
func (p *peer) exchange(number uint32, between func()) {
	for _, part := range [][]byte{framed(requestHeaders()), framed(requestBody(completion[:9], false)), framed(requestBody(completion[9:], true))} {
		between()
		p.WriteData(number, false, part[:7])
		between()
		p.WriteData(number, false, part[7:])
	}
	between()
}

// finish sends a request on a stream and expects its answer.
func (p *peer) finish(number uint32) error {
	p.exchange(number, func() {})
	if _, err := p.read(func(o *outcome) bool { return len(kinds(o.data[number])) > 0 }); err != nil {
		return err
	}
	p.WriteData(number, true, nil)
	o, err := p.read(func(o *outcome) bool { return o.ended(number) })
	if err != nil {
		return err
	}
	if o.status[number] != "0" {
		return fmt.Errorf("status %q, reset %v", o.status[number], o.resets[number])
	}
	return nil
}

func goaway() error {
	p, err := connect()
	if err != nil {
		return err
	}
	defer p.connection.Close()
	number := p.open()
	p.WriteGoAway(0, http2.ErrCodeNo, nil)
	if err := p.finish(number); err != nil {
		return err
	}
	if _, err := p.read(func(*outcome) bool { return false }); !errors.Is(err, io.EOF) {
		return fmt.Errorf("the connection stayed open: %v", err)
	}
	return nil
}

// resets opens streams, sends a part of a request, and resets them. Then it expects a whole exchange on the same connection.
func resets(sent []byte) error {
	p, err := connect()
	if err != nil {
		return err
	}
	defer p.connection.Close()
	for range 50 {
		number := p.open()
		if len(sent) > 0 {
			p.WriteData(number, false, sent)
		}
		p.WriteRSTStream(number, http2.ErrCodeCancel)
	}
	return p.finish(p.open())
}

func pings() error {
	p, err := connect()
	if err != nil {
		return err
	}
	defer p.connection.Close()
	sent := [][8]byte{}
	ping := func() {
		data := [8]byte{1, 2, 3, byte(len(sent))}
		sent = append(sent, data)
		p.WritePing(false, data)
	}
	number := p.open()
	p.exchange(number, ping)
	o, err := p.read(func(o *outcome) bool { return len(o.pongs) == len(sent) && len(kinds(o.data[number])) == 3 })
	if err != nil {
		return err
	}
	if fmt.Sprint(o.pongs) != fmt.Sprint(sent) {
		return fmt.Errorf("answers %v to pings %v", o.pongs, sent)
	}
	return nil
}

func maxStreams() error {
	p, err := connect()
	if err != nil {
		return err
	}
	defer p.connection.Close()
	if p.streamsMax == 0 {
		return fmt.Errorf("the server advertised no limit of streams")
	}
	numbers := []uint32{}
	for range p.streamsMax {
		numbers = append(numbers, p.open())
	}
	extra := p.open()
	o, err := p.read(func(o *outcome) bool { return o.ended(extra) })
	if err != nil {
		return err
	}
	if code := o.resets[extra]; code != http2.ErrCodeRefusedStream {
		return fmt.Errorf("stream %d of %d ended with %v", len(numbers)+1, p.streamsMax, code)
	}
	for _, number := range numbers {
		if err := p.finish(number); err != nil {
			return fmt.Errorf("stream %d: %w", number, err)
		}
	}
	return nil
}
