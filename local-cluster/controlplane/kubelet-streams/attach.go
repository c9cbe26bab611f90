package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"

	"golang.org/x/sys/unix"
	"k8s.io/cri-streaming/pkg/streaming/remotecommand"
)

// shimSocket is the path of the Unix socket of a container's shim. It implements remotecommand.Attacher.
//
// A client sends one byte: 'i' if it has input, 'o' if not. The shim answers with one byte, and with it passes the
// descriptor of the container's input or terminal, if it has one. After that it sends the container's output. A client
// without more input shuts its side down.
type shimSocket string

func (s shimSocket) AttachContainer(_ context.Context, _, _, _ string, stdin io.Reader, stdout, stderr io.WriteCloser,
	tty bool, resize <-chan remotecommand.TerminalSize) error {
	shim, err := net.DialUnix("unix", nil, &net.UnixAddr{Net: "unix", Name: string(s)})
	if err != nil {
		return fmt.Errorf("the container has just ended: %w", err)
	}
	defer shim.Close()
	input, err := join(shim, stdin != nil)
	if err != nil {
		return err
	}
	if input != nil && tty {
		go followSizes(input, resize)
	}
	if input != nil && stdin != nil {
		go func() {
			io.Copy(input, stdin)
			if !tty {
				input.Close()
			}
			shim.CloseWrite()
		}()
	}
	// The shim does not tell a container's outputs apart.
	var output io.Writer = io.Discard
	if stdout != nil {
		output = stdout
	} else if stderr != nil {
		output = stderr
	}
	_, err = io.Copy(output, shim)
	return err
}

// join greets the shim, and returns the container's input or terminal, if it has one.
func join(shim *net.UnixConn, hasInput bool) (*os.File, error) {
	greeting := "o"
	if hasInput {
		greeting = "i"
	}
	if _, err := io.WriteString(shim, greeting); err != nil {
		return nil, err
	}
	rights := make([]byte, unix.CmsgSpace(4))
	_, length, _, _, err := shim.ReadMsgUnix(make([]byte, 1), rights)
	if err != nil {
		return nil, err
	}
	messages, err := unix.ParseSocketControlMessage(rights[:length])
	if err != nil || len(messages) == 0 {
		return nil, err
	}
	descriptors, err := unix.ParseUnixRights(&messages[0])
	if err != nil || len(descriptors) == 0 {
		return nil, errors.Join(err, errors.New("the shim passed no descriptor"))
	}
	return os.NewFile(uintptr(descriptors[0]), "the container's input"), nil
}
