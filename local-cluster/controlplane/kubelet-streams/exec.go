package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/cri-streaming/pkg/streaming/remotecommand"
	utilexec "k8s.io/utils/exec"
)

const (
	// As in a shell.
	notExecutable, notFound, signalled = 126, 127, 128
	// Time for the rest of the output, which a process in the background may keep open.
	drainTimeout = time.Second
)

// command is a command of this machine. It implements remotecommand.Executor.
type command []string

func (c command) ExecInContainer(_ context.Context, _, _, _ string, _ []string, stdin io.Reader,
	stdout, stderr io.WriteCloser, tty bool, resize <-chan remotecommand.TerminalSize, _ time.Duration) error {
	process := exec.Command(c[0], c[1:]...)
	var err error
	if tty {
		stderr = stdout
		err = runInTerminal(process, stdin, stdout, resize)
	} else {
		err = runWithPipes(process, stdin, stdout, stderr)
	}
	var failure startError
	if errors.As(err, &failure) {
		code, sentence := failure.explain(c[0])
		if stderr != nil {
			fmt.Fprintln(stderr, sentence)
		}
		return exitCode(code)
	}
	return withExitCode(err)
}

func runWithPipes(process *exec.Cmd, stdin io.Reader, stdout, stderr io.WriteCloser) error {
	process.WaitDelay = drainTimeout
	if stdout != nil {
		process.Stdout = stdout
	}
	if stderr != nil {
		process.Stderr = stderr
	}
	if stdin != nil {
		// process.Stdin would make Wait wait for a client that sends nothing more.
		pipe, err := process.StdinPipe()
		if err != nil {
			return err
		}
		go func() {
			defer pipe.Close()
			io.Copy(pipe, stdin)
		}()
	}
	if err := process.Start(); err != nil {
		return startError{err}
	}
	return process.Wait()
}

func runInTerminal(process *exec.Cmd, stdin io.Reader, stdout io.WriteCloser,
	resize <-chan remotecommand.TerminalSize) error {
	terminal, itsSide, err := openTerminal()
	if err != nil {
		return err
	}
	defer terminal.Close()
	process.Stdin, process.Stdout, process.Stderr = itsSide, itsSide, itsSide
	process.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if os.Getenv("TERM") == "" {
		process.Env = append(os.Environ(), "TERM=xterm")
	}
	err = process.Start()
	itsSide.Close()
	if err != nil {
		return startError{err}
	}
	if stdin != nil {
		go io.Copy(terminal, stdin)
	}
	go followSizes(terminal, resize)
	drained := make(chan struct{})
	go func() {
		defer close(drained)
		if stdout != nil {
			io.Copy(stdout, terminal)
		}
	}()
	err = process.Wait()
	select {
	case <-drained:
	case <-time.After(drainTimeout):
	}
	return err
}

// openTerminal returns a new terminal, and the side that a process uses.
func openTerminal() (*os.File, *os.File, error) {
	terminal, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		return nil, nil, err
	}
	number, err := unix.IoctlGetInt(int(terminal.Fd()), unix.TIOCGPTN)
	if err == nil {
		err = unix.IoctlSetPointerInt(int(terminal.Fd()), unix.TIOCSPTLCK, 0)
	}
	if err != nil {
		return nil, nil, errors.Join(err, terminal.Close())
	}
	itsSide, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		return nil, nil, errors.Join(err, terminal.Close())
	}
	return terminal, itsSide, nil
}

func followSizes(terminal *os.File, resize <-chan remotecommand.TerminalSize) {
	for size := range resize {
		unix.IoctlSetWinsize(int(terminal.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: size.Height, Col: size.Width})
	}
}

// startError says that a command could not be started.
type startError struct{ error }

func (e startError) Unwrap() error { return e.error }

// explain returns the exit code that a shell gives, and a sentence.
func (e startError) explain(name string) (int, string) {
	switch {
	case errors.Is(e, exec.ErrNotFound):
		return notFound, fmt.Sprintf("The command '%s' was not found on the PATH %s.", name, os.Getenv("PATH"))
	case errors.Is(e, fs.ErrNotExist):
		return notFound, fmt.Sprintf("The command '%s' does not exist.", name)
	}
	return notExecutable, fmt.Sprintf("The command '%s' cannot be started: %v.", name, e)
}

// withExitCode returns an error that has the process's exit code as a shell shows it, or nil if that is 0.
func withExitCode(err error) error {
	var ended *exec.ExitError
	if errors.Is(err, exec.ErrWaitDelay) {
		return nil
	}
	if !errors.As(err, &ended) {
		return err
	}
	if status, ok := ended.Sys().(syscall.WaitStatus); ok && status.Signaled() {
		return exitCode(signalled + int(status.Signal()))
	}
	return exitCode(ended.ExitCode())
}

func exitCode(code int) error {
	return utilexec.CodeExitError{Err: fmt.Errorf("exit status %d", code), Code: code}
}
