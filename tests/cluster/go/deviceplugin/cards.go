package main

import (
	"bufio"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// card is one HPU device as the plugin knows it. The minor number names the device file. The module number is the
// place on the board; on real boards the two orders differ, so they differ here.
type card struct {
	id     string
	minor  int
	module int
}

// cards is what a node has, in the order of the minor numbers.
type cards []card

func newCards(count int) cards {
	all := make(cards, count)
	for minor := range all {
		all[minor] = card{id: fmt.Sprintf("gaudi-%d", minor), minor: minor, module: count - 1 - minor}
	}
	return all
}

// report says of every card whether it is healthy.
func (all cards) report(unhealthy []string) []*api.Device {
	devices := make([]*api.Device, len(all))
	for i, c := range all {
		health := api.Healthy
		if slices.Contains(unhealthy, c.id) {
			health = api.Unhealthy
		}
		devices[i] = &api.Device{ID: c.id, Health: health}
	}
	return devices
}

// environment is what a container that got these cards finds: the names are those of Intel's plugin, which its container
// runtime and the bridge read. The modules are told only to a container that does not get the whole node.
func (all cards) environment(ids []string) (map[string]string, error) {
	chosen := make(cards, 0, len(ids))
	for _, id := range ids {
		i := slices.IndexFunc(all, func(c card) bool { return c.id == id })
		if i < 0 {
			return nil, status.Errorf(codes.InvalidArgument, "no card is called %q on this node", id)
		}
		chosen = append(chosen, all[i])
	}
	slices.SortFunc(chosen, func(a, b card) int { return a.minor - b.minor })
	join := func(name func(card) string) string {
		names := make([]string, len(chosen))
		for i, c := range chosen {
			names[i] = name(c)
		}
		return strings.Join(names, ",")
	}
	found := map[string]string{
		"HABANA_VISIBLE_DEVICES":  join(func(c card) string { return strconv.Itoa(c.minor) }),
		"HL_VISIBLE_DEVICES":      join(func(c card) string { return fmt.Sprintf("/dev/accel/accel%d", c.minor) }),
		"HL_VISIBLE_DEVICES_UUID": join(func(c card) string { return c.id }),
	}
	if len(chosen) < len(all) {
		found["HABANA_VISIBLE_MODULES"] = join(func(c card) string { return strconv.Itoa(c.module) })
	}
	return found, nil
}

// readUnhealthy reads the ids of broken cards, one a line. No file means that all are well.
func readUnhealthy(path string) ([]string, error) {
	file, err := os.Open(path)
	if os.IsNotExist(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }()
	var ids []string
	for lines := bufio.NewScanner(file); lines.Scan(); {
		if id := strings.TrimSpace(lines.Text()); id != "" {
			ids = append(ids, id)
		}
	}
	return ids, nil
}
