package main

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

const (
	kubeletSocket   = "kubelet.sock"
	registerTimeout = 10 * time.Second
)

// plugin serves one resource of one node to the kubelet.
type plugin struct {
	api.UnimplementedDevicePluginServer

	all      cards
	resource string
	folder   string // where the kubelet's socket and ours are

	mutex     sync.Mutex
	unhealthy []string
	changed   chan struct{} // closed, and replaced, when unhealthy changes
}

func newPlugin(all cards, resource, folder string) *plugin {
	return &plugin{all: all, resource: resource, folder: folder, changed: make(chan struct{})}
}

// setUnhealthy names the broken cards and wakes every ListAndWatch.
func (p *plugin) setUnhealthy(ids []string) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	p.unhealthy = ids
	close(p.changed)
	p.changed = make(chan struct{})
}

func (p *plugin) state() ([]*api.Device, <-chan struct{}) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	return p.all.report(p.unhealthy), p.changed
}

// GetDevicePluginOptions says that the plugin wants neither of the two optional calls.
func (p *plugin) GetDevicePluginOptions(context.Context, *api.Empty) (*api.DevicePluginOptions, error) {
	return &api.DevicePluginOptions{}, nil
}

// ListAndWatch sends all cards at once and again whenever the health of one changes.
func (p *plugin) ListAndWatch(_ *api.Empty, stream grpc.ServerStreamingServer[api.ListAndWatchResponse]) error {
	for {
		devices, changed := p.state()
		if err := stream.Send(&api.ListAndWatchResponse{Devices: devices}); err != nil {
			return err
		}
		select {
		case <-changed:
		case <-stream.Context().Done():
			return nil
		}
	}
}

// Allocate answers, for every container, with the environment that names its cards.
func (p *plugin) Allocate(_ context.Context, request *api.AllocateRequest) (*api.AllocateResponse, error) {
	response := &api.AllocateResponse{}
	for _, container := range request.ContainerRequests {
		environment, err := p.all.environment(container.DevicesIds)
		if err != nil {
			return nil, err
		}
		slog.Info("allocated", "cards", container.DevicesIds)
		response.ContainerResponses = append(response.ContainerResponses, &api.ContainerAllocateResponse{Envs: environment})
	}
	return response, nil
}

// endpoint is the name of the plugin's own socket.
func (p *plugin) endpoint() string { return "hpu-device-plugin.sock" }

// serve opens the plugin's socket and registers it with the kubelet. The returned function ends the service.
func (p *plugin) serve(ctx context.Context) (stop func(), err error) {
	path := filepath.Join(p.folder, p.endpoint())
	if err := os.Remove(path); err != nil && !os.IsNotExist(err) {
		return nil, err
	}
	listener, err := net.Listen("unix", path)
	if err != nil {
		return nil, err
	}
	server := grpc.NewServer()
	api.RegisterDevicePluginServer(server, p)
	go func() { _ = server.Serve(listener) }() // ends by Stop, which also removes the socket
	if err := p.register(ctx); err != nil {
		server.Stop()
		return nil, err
	}
	slog.Info("registered", "resource", p.resource, "cards", len(p.all))
	return server.Stop, nil
}

func (p *plugin) register(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, registerTimeout)
	defer cancel()
	connection, err := grpc.NewClient(
		"unix://"+filepath.Join(p.folder, kubeletSocket), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer func() { _ = connection.Close() }()
	_, err = api.NewRegistrationClient(connection).Register(ctx, &api.RegisterRequest{
		Version:      api.Version,
		Endpoint:     p.endpoint(),
		ResourceName: p.resource,
	}, grpc.WaitForReady(true))
	if err != nil {
		return fmt.Errorf("registering with the kubelet: %w", err)
	}
	return nil
}
