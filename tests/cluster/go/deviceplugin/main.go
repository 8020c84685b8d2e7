// Command deviceplugin offers cards that do not exist to a kubelet, over the same interface as Intel's device plugin: a
// cluster of the tests then schedules, allocates and loses cards as a real one does.
//
// It registers anew whenever the kubelet starts, and reads from a file which cards are broken: one id (gaudi-0, ...) a
// line, followed at once when the file changes.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/fsnotify/fsnotify"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

const retryAfter = time.Second

func main() {
	count := flag.Int("cards", 8, "number of cards")
	resource := flag.String("resource", "habana.ai/gaudi", "name of the resource")
	folder := flag.String("sockets", api.DevicePluginPath, "the kubelet's folder for the sockets of device plugins")
	health := flag.String("unhealthy", "", "file with the ids of broken cards, one a line; its folder must exist")
	flag.Parse()

	if *count < 1 || *health == "" {
		fmt.Fprintln(os.Stderr, "deviceplugin: give --cards of 1 or more, and --unhealthy FILE")
		os.Exit(2)
	}
	ctx, cancel := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer cancel()
	if err := run(ctx, newPlugin(newCards(*count), *resource, *folder), *health); err != nil {
		slog.Error("device plugin ends", "error", err)
		os.Exit(1)
	}
}

// run serves until ctx ends. A kubelet that starts removes every socket in the folder and makes its own anew: that
// event is what the plugin registers on.
func run(ctx context.Context, p *plugin, healthFile string) error {
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		return err
	}
	defer func() { _ = watcher.Close() }()
	if err := os.MkdirAll(p.folder, 0o750); err != nil {
		return err
	}
	for _, folder := range []string{p.folder, filepath.Dir(healthFile)} {
		if err := watcher.Add(folder); err != nil {
			return fmt.Errorf("watching %s: %w", folder, err)
		}
	}
	if err := follow(p, healthFile); err != nil {
		return err
	}

	socket := filepath.Join(p.folder, kubeletSocket)
	stop := func() {}
	defer func() { stop() }()
	attempt := time.NewTimer(0) // fires when it is time to register
	defer attempt.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case err := <-watcher.Errors:
			return err
		case event := <-watcher.Events:
			switch {
			case event.Name == socket && event.Has(fsnotify.Create):
				attempt.Reset(0)
			case event.Name == healthFile:
				if err := follow(p, healthFile); err != nil {
					return err
				}
			}
		case <-attempt.C:
			if _, err := os.Stat(socket); errors.Is(err, os.ErrNotExist) {
				continue // its creation is an event
			}
			stop()
			stop = func() {}
			again, err := p.serve(ctx)
			if err != nil {
				slog.Warn("not registered", "error", err, "again_after", retryAfter)
				attempt.Reset(retryAfter)
				continue
			}
			stop = again
		}
	}
}

func follow(p *plugin, healthFile string) error {
	ids, err := readUnhealthy(healthFile)
	if err != nil {
		return err
	}
	slog.Info("health", "unhealthy", ids)
	p.setUnhealthy(ids)
	return nil
}
