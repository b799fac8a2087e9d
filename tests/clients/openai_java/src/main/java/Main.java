import com.fasterxml.jackson.databind.ObjectMapper;
import com.openai.client.OpenAIClient;
import com.openai.client.okhttp.OpenAIOkHttpClient;
import com.openai.core.JsonValue;
import com.openai.errors.OpenAIServiceException;
import com.openai.models.FunctionDefinition;
import com.openai.models.FunctionParameters;
import com.openai.models.audio.transcriptions.TranscriptionCreateParams;
import com.openai.models.chat.completions.ChatCompletionCreateParams;
import com.openai.models.chat.completions.ChatCompletionToolMessageParam;
import com.openai.models.embeddings.EmbeddingCreateParams;
import java.nio.file.Path;
import java.util.List;
import java.util.Map;

/** The openai client for Java. */
public final class Main {
    /** The structured output. */
    public static final class Person {
        public String name;
        public int age;
    }

    private final OpenAIClient client;
    private final String model;
    private final Path file;

    private Main(String url, String model, String file) {
        client = OpenAIOkHttpClient.builder().baseUrl(url + "/v1").apiKey("none-needed").build();
        this.model = model;
        this.file = Path.of(file);
    }

    private ChatCompletionCreateParams.Builder params() {
        return ChatCompletionCreateParams.builder().model(model).addUserMessage("Who is there?");
    }

    private String text(ChatCompletionCreateParams params) {
        return client.chat().completions().create(params).choices().get(0).message().content().orElse("");
    }

    private Map<String, ?> list() {
        return Map.of("models", client.models().list().autoPager().stream().map(one -> one.id()).toList());
    }

    private Map<String, ?> stream(boolean first) {
        try (var events = client.chat().completions().createStreaming(params().build())) {
            var parts = events.stream()
                .flatMap(event -> event.choices().stream())
                .flatMap(choice -> choice.delta().content().stream())
                .filter(part -> !part.isEmpty());
            return first ? Map.of("text", parts.findFirst().orElseThrow()) : Map.of("parts", parts.toList());
        }
    }

    private Map<String, ?> tools() {
        var parameters = FunctionParameters.builder()
            .putAdditionalProperty("type", JsonValue.from("object"))
            .putAdditionalProperty("properties", JsonValue.from(Map.of("city", Map.of("type", "string"))))
            .putAdditionalProperty("required", JsonValue.from(List.of("city")))
            .build();
        var tool = FunctionDefinition.builder().name("weather").parameters(parameters).build();
        var given = params().addFunctionTool(tool);
        var message = client.chat().completions().create(given.build()).choices().get(0).message();
        var call = message.toolCalls().orElseThrow().get(0).asFunction();
        var result = ChatCompletionToolMessageParam.builder().toolCallId(call.id()).content("18 degrees").build();
        var last = text(given.addMessage(message).addMessage(result).build());
        return Map.of("tool", call.function().name(), "arguments", call.function().arguments(), "text", last);
    }

    private Map<String, ?> structured() {
        var answer = client.chat().completions().create(params().responseFormat(Person.class).build());
        return Map.of("object", answer.choices().get(0).message().content().orElseThrow());
    }

    private Map<String, ?> embeddings() {
        var params = EmbeddingCreateParams.builder().model(model).inputOfArrayOfStrings(List.of("one", "two words"));
        var answer = client.embeddings().create(params.build());
        return Map.of("vectors", answer.data().stream().map(row -> row.embedding()).toList());
    }

    private Map<String, ?> upload() {
        var params = TranscriptionCreateParams.builder().model(model).file(file).build();
        return Map.of("text", client.audio().transcriptions().create(params).asTranscription().text());
    }

    private Map<String, ?> error() {
        try {
            return Map.of("text", text(params().build()));
        } catch (OpenAIServiceException error) {
            var name = error.getClass().getSimpleName();
            var code = error.code().orElse("");
            return Map.of("error", name, "status", error.statusCode(), "code", code, "message", error.getMessage());
        }
    }

    private Map<String, ?> outcome(String name) {
        return switch (name) {
            case "list" -> list();
            case "chat", "cold_start" -> Map.of("text", text(params().build()));
            case "stream", "cancel" -> stream(name.equals("cancel"));
            case "tools" -> tools();
            case "structured" -> structured();
            case "embeddings" -> embeddings();
            case "upload" -> upload();
            default -> error();
        };
    }

    public static void main(String[] words) throws Exception {
        var outcome = new Main(words[0], words[1], words[3]).outcome(words[2]);
        System.out.println(new ObjectMapper().writeValueAsString(outcome));
        if (words[2].equals("cancel")) {
            System.in.readAllBytes();
        }
        System.exit(0);
    }
}
