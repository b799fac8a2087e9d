// Reads one JSON body per line, as an engine whose decoder is Go's encoding/json (Ollama) does, and prints one line of
// JSON per body: what it takes for `model`, `stream` and `stream_options.include_usage`.
package main

import (
	"bufio"
	"encoding/json"
	"os"
)

type request struct {
	Model         string `json:"model"`
	Stream        bool   `json:"stream"`
	StreamOptions *struct {
		IncludeUsage bool `json:"include_usage"`
	} `json:"stream_options"`
	CacheSalt any `json:"cache_salt"`
	Lora      any `json:"lora"`
}

func main() {
	lines := bufio.NewReader(os.Stdin)
	answers := json.NewEncoder(os.Stdout)
	for {
		line, err := lines.ReadBytes('\n')
		if err != nil {
			return
		}
		var body request
		if err := json.Unmarshal(line, &body); err != nil {
			answers.Encode(map[string]string{"error": err.Error()})
			continue
		}
		answers.Encode(body)
	}
}
